// An L2 norm, as an op that is not part of the package: its struct for each direction, and its statistics.
//
//   y  = x_hat,   x_hat = x * rstd,   rstd = rsqrt(sum(x²) + epsilon)
//   dx = rstd * (dy - x_hat * sum(dy * x_hat))
#pragma once

#include "call.h"
#include "cpu/engine/stats.h"

namespace toy {

using namespace jaxnorm;

struct L2NormForward {
  int64_t rows, cols;
  Input x;
  Output y;
  float* rstd;  // null where it is not wanted
  float epsilon;
};

struct L2NormBackward {
  int64_t rows, cols;
  Input dy, x;
  const float* rstd;
  Output dx;
};

namespace {

using namespace jaxnorm::cpu;

struct L2 {
  float rstd;

  Vec x_hat(Vec x) const { return x * rstd; }

  template <int R, class Rows>
  static void of(const Rows& x_rows, const L2NormForward& p, L2* stats) {
    const auto square = sum<R, 1>(p.cols, [&](int row, int64_t column, auto extent, Vec* sums) {
      const Vec x = x_rows(row, column, extent);
      sums[0] = fma(x, x, sums[0]);
    });
    for (int row = 0; row < R; ++row) stats[row] = {1 / __builtin_sqrtf(square.values[row][0] + p.epsilon)};
  }
  void save(const L2NormForward& p, int64_t row) const {
    if (p.rstd) p.rstd[row] = rstd;
  }
  static L2 saved(const L2NormBackward& p, int64_t row) { return {p.rstd[row]}; }

  static constexpr int kGradSums = 1;
  static void add(Vec g, Vec x_hat, Vec* sums) { sums[0] = fma(g, x_hat, sums[0]); }
  auto gradient(const Sums<1, kGradSums>& sums) const {
    const Vec minus_sum = broadcast(-sums.values[0][0]);
    return [minus_sum, rstd = rstd](Vec g, Vec x_hat) { return fma(x_hat, minus_sum, g) * rstd; };
  }
};

}  // namespace
}  // namespace toy
