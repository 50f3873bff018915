// The statistics of a row, and the gradient through them.
//
//   Stats::of<R>(rows, p, stats)    those of R rows: one or two passes over them, the later ones from the cache
//   stats.save(p, row)              keeps them for the backward, where that is wanted; Stats::saved(p, row) is them
//   stats.x_hat(x)                  what the epilogue starts from
//   Stats::add(g, x_hat, sums)      adds to the kGradSums sums over a row that its gradient takes
//   stats.gradient(sums)(g, x_hat)  the cotangent of x for the cotangent g of x_hat
//
// `p` is the struct of an op, of which they take what they name.
#pragma once

#include "engine/cpu/columns.h"

namespace jaxnorm::cpu {
namespace {

// x_hat = x * rstd, of the root mean square.
struct Rms {
  float rstd;

  Vec x_hat(Vec x) const { return x * rstd; }

  template <int R, class Rows, class Op>
  static void of(const Rows& x_rows, const Op& p, Rms* stats) {
    const auto square = sum<R, 1>(p.cols, [&](int row, int64_t column, auto extent, Vec* sums) {
      const Vec x = x_rows(row, column, extent);
      sums[0] = fma(x, x, sums[0]);
    });
    for (int row = 0; row < R; ++row) {
      stats[row] = {static_cast<float>(1 / __builtin_sqrt(square.mean(row, 0) + p.epsilon))};
    }
  }

  template <class Op>
  void save(const Op& p, int64_t row) const {
    if (p.rstd) p.rstd[row] = rstd;
  }

  template <class Op>
  static Rms saved(const Op& p, int64_t row) {
    return {p.rstd[row]};
  }

  // dx = rstd * (g - x_hat * mean(g * x_hat))
  static constexpr int kGradSums = 1;
  static void add(Vec g, Vec x_hat, Vec* sums) { sums[0] = fma(g, x_hat, sums[0]); }

  auto gradient(const Sums<1, kGradSums>& sums) const {
    const Vec minus_mean_gx = broadcast(-sums.mean(0, 0));
    return [minus_mean_gx, rstd = rstd](Vec g, Vec x_hat) { return fma(x_hat, minus_mean_gx, g) * rstd; };
  }
};

// x_hat = (x - mean) * rstd. Around the mean as far as f32 holds it, the second pass sums what is left of the mean
// along with the squares: `shift` puts that right in x_hat, so that a large mean costs no accuracy.
struct Layer {
  float mean, rstd, shift;

  Vec x_hat(Vec x) const { return fma(x - mean, broadcast(rstd), broadcast(shift)); }

  template <int R, class Rows, class Op>
  static void of(const Rows& x_rows, const Op& p, Layer* stats) {
    const auto value = sum<R, 1>(
        p.cols, [&](int row, int64_t column, auto extent, Vec* sums) { sums[0] += x_rows(row, column, extent); });
    float centre[R];
    for (int row = 0; row < R; ++row) centre[row] = value.mean(row, 0);
    const auto rest = sum<R, 2>(p.cols, [&](int row, int64_t column, auto extent, Vec* sums) {
      const Vec d = within(x_rows(row, column, extent) - centre[row], extent);
      sums[0] += d;
      sums[1] = fma(d, d, sums[1]);
    });
    for (int row = 0; row < R; ++row) {
      const double left = rest.mean(row, 0);
      const double variance = rest.mean(row, 1) - left * left;
      const double rstd = 1 / __builtin_sqrt((variance < 0 ? 0 : variance) + p.epsilon);
      const double exact = centre[row] + left;
      const float mean = exact;
      // Of an infinite rstd the shift would not be a number.
      const float narrow = static_cast<float>(rstd);
      stats[row] = {mean, narrow, __builtin_isinf(narrow) ? -0.f : static_cast<float>((mean - exact) * rstd)};
    }
  }

  template <class Op>
  void save(const Op& p, int64_t row) const {
    if (!p.rstd) return;
    p.mean[row] = mean;
    p.rstd[row] = rstd;
  }

  template <class Op>
  static Layer saved(const Op& p, int64_t row) {
    return {p.mean[row], p.rstd[row], -0.f};
  }

  // dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat))
  static constexpr int kGradSums = 2;
  static void add(Vec g, Vec x_hat, Vec* sums) {
    sums[0] += g;
    sums[1] = fma(g, x_hat, sums[1]);
  }

  auto gradient(const Sums<1, kGradSums>& sums) const {
    const Vec mean_g = broadcast(sums.mean(0, 0)), minus_mean_gx = broadcast(-sums.mean(0, 1));
    return
        [mean_g, minus_mean_gx, rstd = rstd](Vec g, Vec x_hat) { return fma(x_hat, minus_mean_gx, g - mean_g) * rstd; };
  }
};

}  // namespace
}  // namespace jaxnorm::cpu
