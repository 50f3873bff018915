// What the programs share that run softmax and cross-entropy: masks, and the formulas in float64.
#pragma once

#include <cstdio>
#include <string>

#include "array.h"
#include "ops/shared/logits.h"
#include "ops/shared/mask.h"

namespace jaxnorm {

enum class Masks { none, where, lengths, both, window, window_and_where };

// A mask whose rows go with those of x as an attention's (batch, 1, query, key) goes with (batch, head, query, key).
class TestMask {
 public:
  TestMask(Masks kind, int64_t cols, int64_t offset) : kind_(kind), cols_(cols), bytes_(kRows * cols + 16 + offset) {
    static std::mt19937 random;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(bytes_.data());
    where_ = bytes_.data() + (16 - begin % 16) % 16 + offset;
    for (int64_t i = 0; i < kRows * cols; ++i) where_[i] = random() % 3 == 0 ? 0 : i % 5 == 0 ? 0x80 : 1;
    // Of one row no column counts, of one the first, of one only long runs of columns, and of one all.
    std::fill_n(where_ + 2 * cols, cols, 0);
    std::fill_n(where_ + 3 * cols, cols, 0);
    where_[3 * cols] = 1;
    for (int64_t i = 0; i < cols; ++i) where_[4 * cols + i] = i / 100 % 2;
    std::fill_n(where_ + 5 * cols, cols, 2);
    for (int64_t i = 0; i < kQueries; ++i) lengths_[i] = static_cast<int32_t>((i + 1) * cols / kQueries);
    lengths_[0] = -3;
    lengths_[1] = static_cast<int32_t>(cols / 3);
    // Anywhere in a vector; at the last column of several rows; and before the first column and behind the last.
    for (int64_t i = 0; i < 8; ++i) starts_[i] = static_cast<int32_t>(cols / 8 + i);
    for (int64_t i = 0; i < kQueries; ++i) starts_[8 + i] = std::max(0, lengths_[i] - 1);
    starts_[15] = -4;
    starts_[16] = static_cast<int32_t>(cols);
    starts_[17] = INT32_MAX;
  }

  operator Mask() const {
    Mask mask;
    if (has_where()) mask.where = where_, mask.where_rows = {{kBatch, kHeads * kQueries}, {kQueries, 1}};
    if (has_lengths()) mask.lengths = lengths_, mask.lengths_rows = {{1, 1}, {kQueries, 1}};
    if (has_starts()) mask.starts = starts_, mask.starts_rows = {{1, 1}, {kStarts, 1}};
    return mask;
  }

  bool counts(int64_t row, int64_t col) const {
    const int64_t query = row % kQueries, batch = row / (kHeads * kQueries) % kBatch;
    return (!has_where() || where_[(batch * kQueries + query) * cols_ + col]) &&
           (!has_lengths() || col < lengths_[query]) && (!has_starts() || col >= starts_[row % kStarts]);
  }

 private:
  bool has_where() const { return kind_ == Masks::where || kind_ == Masks::both || kind_ == Masks::window_and_where; }
  bool has_lengths() const { return kind_ >= Masks::lengths; }
  bool has_starts() const { return kind_ >= Masks::window; }

  static constexpr int64_t kBatch = 2, kHeads = 3, kQueries = 7, kRows = kBatch * kQueries, kStarts = 18;
  Masks kind_;
  int64_t cols_;
  std::vector<uint8_t> bytes_;
  uint8_t* where_;
  int32_t lengths_[kQueries], starts_[kStarts];
};

inline const char* name_of(Masks masks) {
  constexpr const char* names[] = {"no mask", "where", "lengths", "where and lengths", "window", "window and where"};
  return names[static_cast<int>(masks)];
}

inline const char* name_of(Dtype dtype) { return dtype == Dtype::f32 ? "f32" : dtype == Dtype::f16 ? "f16" : "bf16"; }

// The logits of a row, with the soft cap where it is not 0.
class LogitsOf {
 public:
  LogitsOf(double scale, double soft_cap) : scale_(scale), cap_(soft_cap) {}
  double operator()(double x) const { return cap_ == 0 ? x * scale_ : cap_ * std::tanh(x * scale_ / cap_); }

 private:
  double scale_, cap_;
};

// Of the logits `z` that count; an empty row has -inf.
struct RowSums {
  double max = -INFINITY, sum = 0, total = 0, size = 0;

  RowSums(const std::vector<double>& z) {
    for (const double value : z) max = value > max || value != value ? value : max;
    for (const double value : z) sum += std::exp(value - max), total += value, size += std::fabs(value);
  }

  double logsumexp() const { return sum == 0 ? -INFINITY : std::log(sum) + max; }
};

// The logarithm of a row's sum, and its top, as the logarithm of the sum that is relative to no top.
inline double logsumexp_of(double log_sum, double top, double unit) {
  if (log_sum == -INFINITY && top > -INFINITY) return NAN;
  return top == -INFINITY ? log_sum : log_sum + top * unit;
}

// Whether both are the same infinity, both not a number, or as close as `tolerance`.
inline bool is_near(double found, double exact, double tolerance) {
  if (std::isnan(exact)) return std::isnan(found);
  return found == exact || std::fabs(found - exact) <= tolerance;
}

}  // namespace jaxnorm
