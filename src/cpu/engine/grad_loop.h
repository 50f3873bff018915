// The loop over a row of every backward op, which is given as functors. Stats is as in stats.h.
//
//   operands.first(column, extent)  in the pass that sums: {d, h, ...}, h as it was normalised to x_hat and d the
//                                   cotangent of x_hat * scale + bias
//   operands.last(column, extent)   the same in the pass that writes, perhaps from what the first pass kept
//   result.needs_sums()             whether there is a first pass
//   result.before_sums(column, in, scale, x_hat, extent)  writes, in the first pass, what takes no sums
//   result.is_wanted()              whether anything takes dh, the cotangent of h
//   result.write(column, in, dh, extent)                  writes it
#pragma once

#include "cpu/engine/memory.h"
#include "cpu/engine/stats.h"
#include "cpu/engine/weight.h"

namespace jaxnorm::cpu {
namespace {

// Sums over rows, a row of f32 each; null where they are not wanted.
struct WeightSums {
  float *dscale = nullptr, *dbias = nullptr;

  WeightSums from(int64_t begin) const { return {dscale ? dscale + begin : nullptr, dbias ? dbias + begin : nullptr}; }
};

template <class Stats, class Operands, class Result>
void grad_row(int64_t cols, Stats stats, Operands operands, Result result, Weight scale = {{}, 1},
              WeightSums sums = {}) {
  Sums<1, Stats::kGradSums> total = {};
  if (result.needs_sums()) {
    total = sum<1, Stats::kGradSums>(cols, [&](int, int64_t column, auto extent, Vec* lanes) {
      const auto in = operands.first(column, extent);
      const Vec factor = scale(column, extent);
      // Past the row's end x_hat is that of h = 0, which may be infinite.
      const Vec x_hat = within(stats.x_hat(in.h), extent);
      result.before_sums(column, in, factor, x_hat, extent);
      Stats::add(in.d * factor, x_hat, lanes);
    });
  }
  const auto gradient = stats.gradient(total);
  for_each_vector(cols, [&](int64_t column, auto extent) {
    const auto in = operands.last(column, extent);
    const Vec x_hat = stats.x_hat(in.h);
    if (result.is_wanted()) result.write(column, in, gradient(in.d * scale(column, extent), x_hat), extent);
    float *const dscale = sums.dscale + column, *const dbias = sums.dbias + column;
    if (sums.dscale) store(dscale, fma(in.d, x_hat, load(dscale, extent)), extent);
    if (sums.dbias) store(dbias, in.d + load(dbias, extent), extent);
  });
}

}  // namespace
}  // namespace jaxnorm::cpu
