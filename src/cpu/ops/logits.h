// The sum of a row's exponentials, and what it is taken of: rows of logits z that are made of x where they are read.
#pragma once

#include "cpu/engine/columns.h"
#include "cpu/engine/row_loop.h"
#include "cpu/ops/exp.h"
#include "cpu/ops/mask.h"

namespace jaxnorm::cpu {
namespace {

constexpr float kNothing = -__builtin_inff();  // the logit of a column that does not count

// z = x * scale. Its slope is scale, which is what grad(dz, x) leaves to the caller.
struct Scaled {
  float scale;

  Vec operator()(Vec x) const { return x * scale; }
  Vec less(float subtrahend, Vec x) const { return fma(x, broadcast(scale), broadcast(-subtrahend)); }
  Vec grad(Vec dz, Vec) const { return dz; }
  float bound() const { return __builtin_inff(); }  // no |z| is above it
};

// z = cap * tanh(x * scale / cap)
struct Capped {
  float scale, cap;

  Vec operator()(Vec x) const { return cap * Tanh(x * (scale / cap)).value; }
  Vec less(float subtrahend, Vec x) const { return (*this)(x)-subtrahend; }
  Vec grad(Vec dz, Vec x) const { return dz * Tanh(x * (scale / cap)).slope; }
  float bound() const { return cap; }
};

// R neighbouring rows of logits, of which the last stands for those beyond `count` too.
template <int R, class X, class Z, bool KEPT>
struct LogitRows {
  using Element = X;
  static constexpr bool kKept = KEPT;  // whether their exponentials are kept
  const X* data[R];
  RowMask mask[R];
  Z z;
  int64_t cols;  // those before the end of the row's mask; of several rows, all
  int64_t ahead;
  float* kept;  // where, `stride` apart
  int64_t stride;

  template <class Extent>
  Vec operator()(int row, int64_t column, Extent extent) const {
    return z(load(data[row] + column, extent));
  }

  Vec counted(Vec z, int row, int64_t column, Whole whole, float otherwise) const {
    return mask[row](z, column, whole, otherwise);
  }
  Vec counted(Vec z, int row, int64_t column, Part part, float otherwise) const {
    return lanes(part) ? mask[row](z, column, part, otherwise) : broadcast(otherwise);
  }
};

// A load functor. `p` has x and a mask.
template <class X, class P, class Z, bool KEPT = false>
struct StoredLogits {
  const P& p;
  Z z;
  int64_t traffic;
  float* kept = nullptr;

  int64_t ahead(int64_t, int64_t) const { return 0; }  // the pass that sums asks for the next rows

  template <int R>
  LogitRows<R, X, Z, KEPT> rows(int64_t first, int64_t count) const {
    const X* const x = static_cast<const X*>(p.x.data);
    LogitRows<R, X, Z, KEPT> rows{{}, {}, z, p.cols, elements_ahead(traffic, R * p.cols, sizeof(X)), kept, p.cols};
    for (int row = 0; row < R; ++row) {
      const int64_t index = first + (row < count ? row : count - 1);
      rows.data[row] = x + index * p.cols;
      rows.mask[row] = RowMask::of(p.mask, index, p.cols);
    }
    if (R == 1) rows.cols = rows.mask[0].end;
    return rows;
  }
};

// The statistics of a row: sum(exp(z - offset)) / 2^power, and sum(z) where SUMS is 2. The largest exponential is about
// 1. No logit is rounded: a small offset is within the exponent, and a large one is so close to what it is subtracted
// from that the difference is exact.
template <int SUMS>
struct SumOfExp {
  float largest, offset = 0, power = 0;  // largest: of the row's z, or what is sure not to be below that
  double sum = 0, total = 0;             // sum: 0 of a row where nothing counts
  const float* kept = nullptr;

  static SumOfExp around(float largest) {
    constexpr float kSmall = 256;
    SumOfExp stats{largest};
    if (largest == -__builtin_inff()) return stats;
    if (largest > -kSmall && largest < kSmall) {
      stats.power = (largest * kLog2e + kRounding) - kRounding;
    } else {
      stats.offset = largest;
    }
    return stats;
  }

  // exp(z - offset) / 2^power
  Vec exp(Vec z) const { return cpu::exp(z - offset, power); }

  double log_sum() const { return __builtin_log(sum); }
  double logsumexp() const { return offset + power * kLn2OfExp + log_sum(); }

  template <class Op>
  void save(const Op&, int64_t) const {}

  template <int R, class Rows, class Op>
  static void of(const Rows& rows, const Op&, SumOfExp* stats) {
    constexpr float kSureBound = 40;  // between logits below it no exponential is lost
    float most[R];
    if (rows.z.bound() <= kSureBound) {
      for (float& each : most) each = rows.z.bound();
    } else {
      cpu::largest<R>(
          rows.cols,
          [&](int row, int64_t column, auto extent) {
            return rows.counted(rows(row, column, extent), row, column, extent, kNothing);
          },
          most);
    }
    for (int row = 0; row < R; ++row) {
      stats[row] = around(most[row]);
      if (Rows::kKept) stats[row].kept = rows.kept + row * rows.stride;
    }
    add_up<R>(rows, stats);
    for (int row = 0; row < R; ++row) {
      if (stats[row].sum == 0 && !rows.mask[row].is_empty()) stats[row].sum = __builtin_nan("");
    }
  }

 private:
  // One row is copied, so that no store can change what the loop knows of it; copying several short ones takes longer
  // than reading them again.
  template <int R, class Rows>
  static void add_up(const Rows& rows, SumOfExp* stats) {
    Sums<R, SUMS> sums;
    if constexpr (R == 1) {
      sums = cpu::sum<1, SUMS>(rows.cols, [rows = rows, stats = *stats](int, int64_t column, auto extent, Vec* sums) {
        stats.add(rows, 0, column, extent, sums);
      });
    } else {
      sums = cpu::sum<R, SUMS>(rows.cols, [&](int row, int64_t column, auto extent, Vec* sums) {
        stats[row].add(rows, row, column, extent, sums);
      });
    }
    for (int row = 0; row < R; ++row) {
      stats[row].sum = sums.values[row][0];
      stats[row].total = sums.values[row][SUMS - 1];
    }
  }

  template <class Rows, class Extent>
  [[gnu::always_inline]] void add(const Rows& rows, int row, int64_t column, Extent extent, Vec* sums) const {
    if (rows.ahead) __builtin_prefetch(rows.data[row] + column + rows.ahead);
    const Vec z = rows(row, column, extent);
    const Vec e = exp(rows.counted(z, row, column, extent, kNothing));
    if (Rows::kKept) store(rows.kept + row * rows.stride + column, e, extent);
    sums[0] += e;
    if (SUMS == 2) sums[1] += rows.counted(z, row, column, extent, 0);
  }
};

// Rows [begin, end). Rows of lengths of their own are not taken together.
template <class Stats, class P, class Load, class Epilogue>
void for_logit_rows(const P& p, int64_t begin, int64_t end, int64_t traffic, Load load, Epilogue epilogue) {
  if (p.mask.lengths) {
    for_rows<1, Stats>(p, begin, end, traffic, load, epilogue);
    fence();
  } else {
    for_rows<Stats>(p, begin, end, traffic, load, epilogue);
  }
}

}  // namespace
}  // namespace jaxnorm::cpu
