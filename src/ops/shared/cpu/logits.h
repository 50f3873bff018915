// Which columns of a row count, and rows of logits z that are made of x where they are read, with the sum of a row's
// exponentials.
#pragma once

#include "engine/cpu/columns.h"
#include "engine/cpu/row_loop.h"
#include "ops/shared/cpu/functions.h"
#include "ops/shared/logits.h"

namespace jaxnorm::cpu {
namespace {

// All bits of a lane, where it lies within the row.
Bits lanes(Part part) {
  uint32_t index[W];
  for (int i = 0; i < W; ++i) index[i] = i;
  Bits lane;
  memcpy(&lane, index, sizeof lane);
  return (Bits)(lane < static_cast<uint32_t>(part.count));
}

// All bits of a lane, where a byte is not 0.
Bits lanes(const uint8_t* p, Whole) {
  Bytes bytes;
  memcpy(&bytes, p, sizeof bytes);
  return (Bits)(__builtin_convertvector(bytes, Bits) != 0);
}
Bits lanes(const uint8_t* p, Part part) {
  uint8_t bytes[W] = {};
  memcpy(bytes, p, part.count);
  return lanes(bytes, Whole{});
}

int64_t row_of(const BroadcastRows& map, int64_t row) {
  const auto index = [row](RowMap run) { return run.count == 1 ? 0 : row / run.inner % run.count; };
  return index(map.outer) * map.inner.count + index(map.inner);
}

// The columns of one row. Those outside of [begin, begin + cols) do not count, and are left to the caller: all others
// are numbered from `begin` on.
struct RowMask {
  const uint8_t* where;  // null: all count
  int64_t begin, cols;

  static RowMask of(const Mask& mask, int64_t row, int64_t cols) {
    return mask ? find(mask, row, cols) : RowMask{nullptr, 0, cols};
  }

  // v, and `otherwise` in columns that do not count.
  template <class Extent>
  Vec operator()(Vec v, int64_t column, Extent extent, float otherwise) const {
    return where ? (lanes(where + column, extent) ? v : broadcast(otherwise)) : v;
  }

  // How many columns count.
  int64_t count() const {
    int64_t count = 0;
    for (int64_t column = 0; column < cols; ++column) count += !where || where[column];
    return count;
  }

  bool is_empty() const { return count() == 0; }

 private:
  // A function of its own: its divisions would stand in every loop over rows.
  [[gnu::noinline]] static RowMask find(const Mask& mask, int64_t row, int64_t cols) {
    const auto within = [](int64_t column, int64_t cols) { return column < 0 ? 0 : column < cols ? column : cols; };
    const int64_t length = mask.lengths ? mask.lengths[row_of(mask.lengths_rows, row)] : cols;
    const int64_t end = within(length, cols);
    const int64_t first = mask.starts       ? mask.starts[row_of(mask.starts_rows, row)]
                          : mask.window > 0 ? std::max<int64_t>(length, 0) - mask.window
                                            : 0;
    const int64_t begin = within(first, end);
    const uint8_t* const where = mask.where ? mask.where + row_of(mask.where_rows, row) * cols + begin : nullptr;
    return {where, begin, end - begin};
  }
};

constexpr float kNothing = -__builtin_inff();  // the logit of a column that does not count

// z = x * scale, see ops/shared/logits.h. Its slope is the scale, which is what grad(dz, x) leaves to the caller.
struct Scaled {
  float power, unit;

  explicit Scaled(const Scale& scale) : power(scale.power), unit(scale.unit) {}

  Vec w(Vec x) const { return x * power; }
  // What is the largest where w is, and w of that.
  Vec key(Vec x) const { return w(x); }
  float of_key(float key) const { return key; }
  // z less the logit at `origin`.
  Vec difference(Vec x, float origin) const { return fma(x, broadcast(power), broadcast(-origin)) * unit; }
  Vec grad(Vec dz, Vec) const { return dz; }
};

// z = cap * tanh(x * scale / cap)
struct Capped {
  float of_cap, cap;
  static constexpr float unit = 1;

  Capped(const Scale& scale, float cap) : of_cap(scale.whole / cap), cap(cap) {}

  Vec w(Vec x) const { return cap * Tanh(x * of_cap).value; }
  Vec key(Vec x) const { return of_cap < 0 ? -x : x; }
  float of_key(float key) const { return w(broadcast(of_cap < 0 ? -key : key))[0]; }
  Vec difference(Vec x, float origin) const { return w(x) - origin; }
  Vec grad(Vec dz, Vec x) const { return dz * Tanh(x * of_cap).slope; }
};

// What is subtracted: not the top of a row where nothing counts, so that no difference of it is NaN.
float origin_of(float top) { return top == kNothing ? 0 : top; }

// R neighbouring rows of logits, of which the last stands for those beyond `count` too.
template <int R, class X, class Z, bool KEPT>
struct LogitRows {
  using Element = X;
  static constexpr bool kKept = KEPT;  // whether their exponentials are kept
  const X* data[R];
  RowMask mask[R];
  Z z;
  int64_t cols;  // those of the row's mask; of several rows, all
  int64_t ahead;
  float* kept;  // where, `stride` apart
  int64_t stride;

  template <class Extent>
  Vec operator()(int row, int64_t column, Extent extent) const {
    return load(data[row] + column, extent);
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
      rows.mask[row] = RowMask::of(p.mask, index, p.cols);
      rows.data[row] = x + index * p.cols + rows.mask[row].begin;
    }
    if (R == 1) rows.cols = rows.mask[0].cols;
    return rows;
  }
};

// d - sum * exp(t), of which no digit is lost where d is close to `sum` and t to 0.
[[gnu::always_inline]] inline Vec less_share(Vec d, float sum, Vec t) {
  const Exp e(t);
  const Vec power = e.times_power(broadcast(1)), less_1 = fma(e.rest, power, power - 1);
  const Bits is_most = (Bits)(t > -0.25f);
  const Vec share = (Vec)((is_most & (Bits)less_1) | (~is_most & (Bits)e.value()));
  return fma(broadcast(-sum), share, d - (Vec)(is_most & (Bits)broadcast(sum)));
}

// What is added up of a row, of differences of z to the top's.
enum Added : int {
  kSum = 1,             // the exponentials
  kLogSum = 2,          // the same, and apart how many are the top's, so that the logarithm keeps its digits
  kLogSumAndTotal = 3,  // and the differences
};

template <Added ADDED>
struct SumOfExp {
  float top, origin;
  double rest = 0;  // of the sum, less 1; NaN where that is
  double total = 0;
  const float* kept = nullptr;

  double log_sum() const { return __builtin_log1p(rest); }
  // With the top's z, as programs of before want it; then a row that is -inf throughout is told.
  double logsumexp(float unit) const {
    if (rest == -1 && top != kNothing) return __builtin_nan("");
    return static_cast<double>(origin) * unit + log_sum();
  }
  // Of a row in which nothing counts 0, and NaN of one that is -inf throughout.
  double reciprocal() const { return rest == -1 ? (top == kNothing ? 0 : __builtin_nan("")) : 1 / (1 + rest); }

  template <class Op>
  void save(const Op&, int64_t) const {}

  template <int R, class Rows, class Op>
  static void of(const Rows& rows, const Op&, SumOfExp* stats) {
    float most[R];
    cpu::largest<R>(
        rows.cols,
        [&](int row, int64_t column, auto extent) {
          return rows.counted(rows.z.key(rows(row, column, extent)), row, column, extent, kNothing);
        },
        most);
    for (int row = 0; row < R; ++row) {
      const bool is_empty = most[row] == kNothing && rows.mask[row].is_empty();
      const float top = rows.z.of_key(most[row]);
      stats[row].top = is_empty ? kNothing : top < -__FLT_MAX__ ? -__FLT_MAX__ : top;
      stats[row].origin = origin_of(stats[row].top);
      if (Rows::kKept) stats[row].kept = rows.kept + row * rows.stride;
    }
    add_up<R>(rows, stats);
  }

 private:
  // One row is copied, so that no store can change what the loop knows of it; copying several short ones takes longer
  // than reading them again.
  template <int R, class Rows>
  static void add_up(const Rows& rows, SumOfExp* stats) {
    Sums<R, ADDED> sums;
    if constexpr (R == 1) {
      sums = cpu::sum<1, ADDED>(rows.cols, [rows = rows, stats = *stats](int, int64_t column, auto extent, Vec* sums) {
        stats.add(rows, 0, column, extent, sums);
      });
    } else {
      sums = cpu::sum<R, ADDED>(rows.cols, [&](int row, int64_t column, auto extent, Vec* sums) {
        stats[row].add(rows, row, column, extent, sums);
      });
    }
    for (int row = 0; row < R; ++row) {
      const auto& of_row = sums.values[row];
      stats[row].rest = of_row[0] + (ADDED == kSum ? -1 : of_row[1] - 1);
      if (ADDED == kLogSumAndTotal) stats[row].total = of_row[ADDED - 1];
    }
  }

  template <class Rows, class Extent>
  [[gnu::always_inline]] void add(const Rows& rows, int row, int64_t column, Extent extent, Vec* sums) const {
    if (rows.ahead) __builtin_prefetch(rows.data[row] + column + rows.ahead);
    const Vec difference = rows.z.difference(rows(row, column, extent), origin);
    const Vec t = rows.counted(difference, row, column, extent, kNothing), e = exp(t);
    if (Rows::kKept) store(rows.kept + row * rows.stride + column, e, extent);
    if constexpr (ADDED == kSum) {
      sums[0] += e;
    } else {
      const Bits is_top = (Bits)(t == 0);
      sums[0] += (Vec)((Bits)e & ~is_top);
      sums[1] += (Vec)((Bits)broadcast(1) & is_top);
    }
    if constexpr (ADDED == kLogSumAndTotal) sums[2] += rows.counted(difference, row, column, extent, 0);
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
