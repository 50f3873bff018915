// The loop over rows of every backward op, which is given as functors: Stats, see stats.h, and for each row
//
//   op.operands(row), which reads
//     first(column, extent)     in the pass that sums: {d, h, ...}, h as it was normalised to x_hat and d the cotangent
//     of
//                               x_hat * scale + bias
//     last(column, extent)      the same in the pass that writes, perhaps from what the first pass kept
//   op.result(row), which writes
//     needs_sums()              whether there is a first pass
//     before_sums(column, in, scale, x_hat, extent)  in the first pass, what takes no sums
//     is_wanted()               whether anything takes dh, the cotangent of h
//     write(column, in, dh, extent)
//   op.weights(row)             -> GradWeights
#pragma once

#include "engine/cpu/memory.h"
#include "engine/cpu/stats.h"
#include "engine/cpu/weight.h"

namespace jaxnorm::cpu {
namespace {

// The scale of a row, and where the sums over rows of dscale and dbias are; null: they are not wanted.
struct GradWeights {
  Weight scale = {{}, 1};
  float *dscale = nullptr, *dbias = nullptr;
};

// A function of its own: within the loop over rows, what stays the same from row to row would take the sums' registers.
template <class Stats, class P, class Op>
[[gnu::noinline]] void grad_row(const P& p, const Op& op, int64_t row) {
  const Stats stats = Stats::saved(p, row);
  const auto operands = op.operands(row);
  const auto result = op.result(row);
  const GradWeights weights = op.weights(row);
  Sums<1, Stats::kGradSums> total = {};
  if (result.needs_sums()) {
    total = sum<1, Stats::kGradSums>(p.cols, [&](int, int64_t column, auto extent, Vec* sums) {
      const auto in = operands.first(column, extent);
      const Vec scale = weights.scale(column, extent), g = in.d * scale;
      // Past the row's end x_hat is that of h = 0, which may be infinite.
      const Vec x_hat = within(stats.x_hat(in.h), extent);
      result.before_sums(column, in, scale, x_hat, extent);
      Stats::add(g, x_hat, sums);
    });
  }
  const auto gradient = stats.gradient(total);
  for_each_vector(p.cols, [&](int64_t column, auto extent) {
    const auto in = operands.last(column, extent);
    const Vec x_hat = stats.x_hat(in.h);
    if (result.is_wanted()) result.write(column, in, gradient(in.d * weights.scale(column, extent), x_hat), extent);
    float *const dscale = weights.dscale + column, *const dbias = weights.dbias + column;
    if (weights.dscale) store(dscale, fma(in.d, x_hat, load(dscale, extent)), extent);
    if (weights.dbias) store(dbias, in.d + load(dbias, extent), extent);
  });
}

// Rows [begin, end) of the op whose struct is `p`.
template <class Stats, class P, class Op>
void for_grad_rows(const P& p, int64_t begin, int64_t end, const Op& op) {
  for (int64_t row = begin; row < end; ++row) grad_row<Stats>(p, op, row);
  fence();
}

}  // namespace
}  // namespace jaxnorm::cpu
