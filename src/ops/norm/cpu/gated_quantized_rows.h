// The rows of gated RMSNorm with a quantised result.
//
// y is kept as float32 in a row that stays in the cache, or each pass of the quantisation would compute the activation
// again.
#pragma once

#include "ops/norm/cpu/gated_rows.h"
#include "ops/norm/cpu/quantized_rows.h"
#include "ops/norm/quantized.h"

namespace jaxnorm::cpu {
namespace {

void quantize_row(const GatedNormQuantizedForward& p, int64_t row, const float* y) {
  const Weight smooth(p.quantized.smooth, 1, weights_of(p.weight_rows, row, p.cols));
  const auto v = [&](int64_t column, auto extent) { return load(y + column, extent) * smooth(column, extent); };
  with_quantized_type(p.quantized.values.dtype, [&](auto q) {
    for (int64_t begin = 0; begin < p.cols; begin += p.quantized.group)
      quantize(p.quantized, row, p.cols, begin, v, v, q);
  });
}

// An epilogue: a row of y as another epilogue writes it to `y`, quantised.
template <class Write>
struct QuantizeWritten {
  const GatedNormQuantizedForward& p;
  Write write;
  const float* y;

  template <class Stats, class X>
  void operator()(int64_t row, Stats stats, RowReader<X> x) const {
    write(row, stats, x);
    quantize_row(p, row, y);
  }
};

void gated_norm_quantized(const GatedNormQuantizedForward& p, int64_t begin, int64_t end, float* products, float* row,
                          int64_t traffic) {
  const auto y = [&](auto) { return OutputRows<float>({row, Dtype::f32}, 0, 0); };
  for_gated_rows(p, begin, end, products, traffic, y,
                 [&](auto write) { return QuantizeWritten<decltype(write)>{p, write, row}; });
}

}  // namespace
}  // namespace jaxnorm::cpu
