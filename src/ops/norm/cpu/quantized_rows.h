// The rows of the norms with a quantised result.
#pragma once

#include "engine/cpu/weight.h"
#include "ops/norm/cpu/norm_rows.h"
#include "ops/shared/cpu/quantize.h"

namespace jaxnorm::cpu {
namespace {

// A row of y as it is, rounded.
template <class Stats, class X>
void write_y(const QuantizedNormForward& p, int64_t row, Stats stats, RowReader<X> x, int64_t traffic) {
  with_type(p.y.dtype, [&](auto y) {
    const OutputRows<decltype(y)> y_rows(p.y, p.cols, traffic);
    Write<decltype(y)>{p.cols, y_rows, p.scale, p.bias}(row, stats, x);
  });
}

// An epilogue: writes y quantised, after y itself where that is wanted.
template <class Q>
struct WriteQuantized {
  const QuantizedNormForward& p;
  Affine affine;
  Weight smooth;
  int64_t traffic;

  template <class Stats, class X>
  void operator()(int64_t row, Stats stats, RowReader<X> x) const {
    if (p.y) write_y(p, row, stats, RowReader<X>{x.data, 0}, traffic);
    const auto values = [&](RowReader<X> x) {
      return [x, stats, affine = affine, smooth = smooth](int64_t column, auto extent) {
        return affine(stats.x_hat(x(column, extent)), column, extent) * smooth(column, extent);
      };
    };
    for (int64_t begin = 0; begin < p.cols; begin += p.quantized.group) {
      quantize(p.quantized, row, p.cols, begin, values({x.data, 0}), values(x), Q{});
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
        const WriteQuantized<decltype(q)> write{p, affine, smooth, traffic};
        for_rows<decltype(stats)>(p, begin, end, traffic, load, write);
      });
    });
  });
}

}  // namespace
}  // namespace jaxnorm::cpu
