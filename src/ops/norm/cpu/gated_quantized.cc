// The rows of gated RMSNorm with a quantised result, and their launch.
//
// y is kept as float32 in a row that stays in the cache, or each pass of the quantisation would compute the activation
// again.
#include "ops/norm/gated_quantized.h"

#include "engine/cpu/f32_weight.h"
#include "ops/norm/cpu/gated_rows.h"
#include "ops/norm/cpu/quantized_rows.h"

namespace jaxnorm::cpu {

struct GatedNormQuantizedKernels {
  static const GatedNormQuantizedKernels baseline, avx2, avx512;

  // Of rows [begin, end), with room for products and for a row of y; `traffic` is how many bytes all rows of the call
  // read and write.
  void (*rows)(const GatedNormQuantizedForward& p, int64_t begin, int64_t end, float* products, float* y,
               int64_t traffic);
};

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

void quantized_rows(const GatedNormQuantizedForward& p, int64_t begin, int64_t end, float* products, float* y,
                    int64_t traffic) {
  const auto rows_of_y = [&](auto) { return OutputRows<float>({y, Dtype::f32}, 0, 0); };
  for_gated_rows(p, begin, end, products, traffic, rows_of_y,
                 [&](auto write) { return QuantizeWritten<decltype(write)>{p, write, y}; });
}

}  // namespace

const GatedNormQuantizedKernels GatedNormQuantizedKernels::JAXNORM_ISA = {quantized_rows};

#ifdef JAXNORM_ONCE
void run(const GatedNormQuantizedForward& call, const ParallelFor& parallel_for) {
  GatedNormQuantizedForward p = call;
  const int64_t elements = p.rows * p.cols, weights = p.weight_rows.count * p.cols;
  const F32Weight scale(&p.scale, p.scale_offset, weights, parallel_for);
  const F32Weight smooth(&p.quantized.smooth, 0, weights, parallel_for);
  const int64_t traffic = elements * (2 * size_of(p.x.dtype) + size_of(p.quantized.values.dtype));
  expect_writes(p.quantized.values, elements);
  const int64_t products = floats_of_rows(p.cols);
  for_each_rows_with_room(parallel_for, p.rows, p.cols, products + p.cols,
                          [&](int64_t begin, int64_t end, float* room) {
                            const auto& of_isa = kernels<GatedNormQuantizedKernels>();
                            of_isa.rows(p, begin, end, room, room + products, traffic);
                          });
}
#endif

}  // namespace jaxnorm::cpu
