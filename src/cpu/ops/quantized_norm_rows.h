// The rows of the norms with a quantised result.
#pragma once

#include "cpu/engine/weight.h"
#include "cpu/ops/norm_rows.h"
#include "cpu/ops/quantize.h"

namespace jaxnorm::cpu {
namespace {

template <class F>
void with_quantized_type(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f8e4m3fn:
      return f(F8E4M3FN{});
    case Dtype::f8e5m2:
      return f(F8E5M2{});
    default:
      return f(S8{});
  }
}

// An epilogue: writes y quantised.
template <class Q>
struct WriteQuantized {
  Affine affine;
  Weight smooth;
  const Quantization& quantization;
  int64_t cols;

  template <class Stats, class X>
  void operator()(int64_t row, Stats stats, RowReader<X> last_x) const {
    const RowReader<X> x{last_x.data, 0};
    const auto v = [&](int64_t column, auto extent, bool is_last) {
      const Vec x_hat = stats.x_hat((is_last ? last_x : x)(column, extent));
      return affine(x_hat, column, extent) * smooth(column, extent);
    };
    for (int64_t begin = 0; begin < cols; begin += quantization.group) {
      quantize(quantization, row, cols, begin, v, Q{});
    }
  }
};

void quantized_norm(const QuantizedNormForward& p, const Addition* addition, int64_t begin, int64_t end,
                    int64_t traffic) {
  const Affine affine(p.scale, p.bias);
  const Weight smooth(p.quantized.smooth, 1);
  with_stats(p.kind, [&](auto stats) {
    with_type(p.x.dtype, [&](auto x) {
      with_quantized_type(p.quantized.values.dtype, [&](auto q) {
        const Stored<decltype(x)> load{p.x, p.cols, addition};
        const WriteQuantized<decltype(q)> write{affine, smooth, p.quantized, p.cols};
        for_rows<decltype(stats)>(p, begin, end, traffic, load, write);
      });
    });
  });
}

}  // namespace
}  // namespace jaxnorm::cpu
