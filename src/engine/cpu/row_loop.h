// The loops over rows of every forward and backward op, and the statistics that they take.
#pragma once

#include "engine/cpu/columns.h"

namespace jaxnorm::cpu {
namespace {

// The statistics of a row, and the gradient through them.
//
//   Stats::of<R>(rows, p, stats)    those of R rows: one or two passes over them, the later ones from the cache
//   stats.save(p, row)              keeps them for the backward, where that is wanted; Stats::saved(p, row) is them
//   stats.x_hat(x)                  what the epilogue starts from
//   Stats::add(g, x_hat, sums)      adds to the kGradSums sums over a row that its gradient takes
//   stats.gradient(sums)(g, x_hat)  the cotangent of x for the cotangent g of x_hat
//
// `p` is the struct of an op, of which they take what they name.

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

// The loop over rows of every forward op, which is given as functors:
//
//   load.rows<R>(first, count)   -> Rows<R, T>  what is normalised; load.ahead(traffic, elements) as elements_ahead()
//   Stats                                       as above
//   epilogue(row, stats, reader)                writes a row of results; `reader` reads what is normalised once more

// A row whose sums are over sooner than their horizontal additions, root and quotient goes with three others, so that
// these wait together. It has one accumulator for each sum then, whatever rows are beside it.
constexpr int64_t kShort = 512;
constexpr int kTogether = kChains;

// R rows at a time.
template <int R, class Stats, class Op, class Load, class Epilogue>
void for_rows(const Op& p, int64_t begin, int64_t end, int64_t traffic, Load load, Epilogue epilogue) {
  const int64_t ahead = load.ahead(traffic, R * p.cols);
  for (int64_t first = begin; first < end; first += R) {
    const int64_t count = end - first < R ? end - first : R;
    const auto rows = load.template rows<R>(first, count);
    using Element = typename decltype(load.template rows<R>(0, 0))::Element;
    Stats stats[R];
    Stats::template of<R>(rows, p, stats);
    for (int64_t i = 0; i < count; ++i) {
      stats[i].save(p, first + i);
      epilogue(first + i, stats[i], RowReader<Element>{rows.data[i], ahead});
    }
  }
}

// Rows [begin, end). `traffic`: how many bytes all rows of the call read and write.
template <class Stats, class Op, class Load, class Epilogue>
void for_rows(const Op& p, int64_t begin, int64_t end, int64_t traffic, Load load, Epilogue epilogue) {
  if (p.cols <= kShort) {
    for_rows<kTogether, Stats>(p, begin, end, traffic, load, epilogue);
  } else {
    for_rows<1, Stats>(p, begin, end, traffic, load, epilogue);
  }
  fence();
}

// The loop over rows of every backward op, which is given as functors: Stats, as above, and for each row
//
//   op.operands(row), which reads
//     first(column, extent)     in the pass that sums: {d, h, ...}, h as it was normalised to x_hat and d the cotangent
//                               of x_hat * scale + bias
//     last(column, extent)      the same in the pass that writes, perhaps from what the first pass kept
//   op.result(row), which writes
//     needs_sums()              whether there is a first pass
//     before_sums(column, in, scale, x_hat, extent)  in the first pass, what takes no sums
//     is_wanted()               whether anything takes dh, the cotangent of h
//     write(column, in, dh, extent)
//   op.weights(row)             -> GradWeights

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
