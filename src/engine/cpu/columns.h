// Loops over the columns of rows, in vectors.
//
// An extent is Whole or Part, see vector.h: a functor is generic in it and compiled for both.
#pragma once

#include "engine/cpu/vector.h"

namespace jaxnorm::cpu {
namespace {

// Inlined always: what f has captured would otherwise be read again after each write.
template <class F>
[[gnu::always_inline]] inline void for_each_vector(int64_t cols, F f) {
  int64_t column = 0;
  for (; column + W <= cols; column += W) f(column, Whole{});
  if (column < cols) f(column, Part{cols - column});
}

template <class T>
void fill(T* data, float value, int64_t count) {
  for_each_vector(count, [&](int64_t i, auto extent) { store(data + i, broadcast(value), extent); });
}

// Additions that do not wait for each other: these many vectors of one row, or as many rows.
constexpr int kChains = 4;

template <int R, int N>
struct Sums {
  double values[R][N];
  double reciprocal_cols;  // known before the sums are: a product waits less long for them than a quotient
  double mean(int row, int i) const { return values[row][i] * reciprocal_cols; }
};

// N sums over each of R rows; add(row, column, extent, sums) adds one vector's part to each. Accumulators are f32
// within blocks of 64 additions a lane and double across blocks, so that the error does not grow with the row's length.
template <int R, int N, class Add>
Sums<R, N> sum(int64_t cols, Add add) {
  constexpr int kUnroll = kChains / R;
  constexpr int64_t kBlock = 64 * kUnroll * W;
  Sums<R, N> total = {{}, 1. / cols};
  for (int64_t begin = 0; begin < cols; begin += kBlock) {
    const int64_t end = cols - begin < kBlock ? cols : begin + kBlock;
    Vec lanes[kUnroll][R][N] = {};
    int64_t column = begin;
    for (; column + kUnroll * W <= end; column += kUnroll * W) {
      for (int u = 0; u < kUnroll; ++u) {
        for (int row = 0; row < R; ++row) add(row, column + u * W, Whole{}, lanes[u][row]);
      }
    }
    for_each_vector(end - column, [&](int64_t rest, auto extent) {
      for (int row = 0; row < R; ++row) add(row, column + rest, extent, lanes[0][row]);
    });
    for (int row = 0; row < R; ++row) {
      for (int i = 0; i < N; ++i) {
        for (int u = 1; u < kUnroll; ++u) lanes[0][row][i] += lanes[u][row][i];
        total.values[row][i] += sum_of_lanes(lanes[0][row][i]);
      }
    }
  }
  return total;
}

// The largest of each of R rows' values, NaN left out; -inf without any. value(row, column, extent) is -inf past the
// row's end.
template <int R, class Value>
void largest(int64_t cols, Value value, float* result) {
  constexpr int kUnroll = kChains / R;
  const auto take = [](Vec v, Vec* lanes) { *lanes = v > *lanes ? v : *lanes; };
  Vec lanes[R][kUnroll];
  for (int i = 0; i < kChains; ++i) lanes[i / kUnroll][i % kUnroll] = broadcast(-__builtin_inff());
  int64_t column = 0;
  for (; column + kUnroll * W <= cols; column += kUnroll * W) {
    for (int u = 0; u < kUnroll; ++u) {
      for (int row = 0; row < R; ++row) take(value(row, column + u * W, Whole{}), &lanes[row][u]);
    }
  }
  for_each_vector(cols - column, [&](int64_t rest, auto extent) {
    for (int row = 0; row < R; ++row) take(value(row, column + rest, extent), &lanes[row][0]);
  });
  for (int row = 0; row < R; ++row) {
    for (int u = 1; u < kUnroll; ++u) take(lanes[row][u], &lanes[row][0]);
    result[row] = max_of_lanes(lanes[row][0]);
  }
}

}  // namespace
}  // namespace jaxnorm::cpu
