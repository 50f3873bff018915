// Loops over the columns of rows, in vectors, and what they read and write: rows in memory, and weights.
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

// R neighbouring rows, of which the last stands for those beyond `count` too.
template <int R, class T>
struct Rows {
  using Element = T;
  const T* data[R];

  // Rows begin `stride` elements apart.
  Rows(const T* array, int64_t stride, int64_t first, int64_t count) {
    for (int row = 0; row < R; ++row) data[row] = array + (first + (row < count ? row : count - 1)) * stride;
  }

  template <class Extent>
  Vec operator()(int row, int64_t column, Extent extent) const {
    return load(data[row] + column, extent);
  }
};

// A core reaches this much of last-level cache. What the system says of it is no use: in a virtual machine it may be
// the sum of many caches.
constexpr int64_t kCache = 32 << 20;

// How many elements ahead of the pass that writes its input is asked for, if that comes from memory: at least so far
// that it arrives in time, and at most so far that it still lies in the second-level cache when it is read.
int64_t elements_ahead(int64_t traffic, int64_t elements, int64_t size) {
  constexpr int64_t kLeast = 1 << 13, kMost = 1 << 18;
  if (traffic <= kCache) return 0;
  return (elements * size < kLeast ? kLeast : elements * size > kMost ? kMost : elements * size) / size;
}

// One row in the pass that writes. What the next rows' first pass will read is asked for meanwhile, where it has to
// come from memory: that pass does nothing but wait for it.
template <class T>
struct RowReader {
  const T* data;
  int64_t ahead;  // in elements; 0: nothing is asked for

  RowReader from(int64_t column) const { return {data + column, ahead}; }

  template <class Extent>
  Vec operator()(int64_t column, Extent extent) const {
    if (ahead) __builtin_prefetch(data + column + ahead);
    return load(data + column, extent);
  }
};

// One row of a result. Past the caches, a line of memory is not read before it is written.
template <class T>
struct RowWriter {
  T* data;  // null: the result is not wanted
  bool past_caches;

  explicit operator bool() const { return data != nullptr; }

  // Vectors that begin at another column are no longer aligned.
  RowWriter from(int64_t column) const { return {data + column, past_caches && column % W == 0}; }

  void operator()(int64_t column, Vec v, Whole whole) const {
    if (past_caches) {
      stream(data + column, v);
    } else {
      store(data + column, v, whole);
    }
  }
  void operator()(int64_t column, Vec v, Part part) const { store(data + column, v, part); }
};

// An operand whose rows begin `stride` elements apart.
template <class T>
struct InputRows {
  const T* data;
  int64_t stride, ahead;

  InputRows(Input input, int64_t stride, int64_t traffic = 0)
      : data(static_cast<const T*>(input.data)), stride(stride), ahead(elements_ahead(traffic, stride, sizeof(T))) {}

  const T* operator[](int64_t row) const { return data ? data + row * stride : nullptr; }
  RowReader<T> reader(int64_t row) const { return {data + row * stride, ahead}; }
};

// A result whose rows begin `stride` elements apart. They go past the caches if whoever reads them would not find much
// of them there, and all their whole vectors are aligned as stream() wants them.
template <class T>
struct OutputRows {
  using Element = T;

  T* data;
  int64_t stride;
  bool past_caches;

  OutputRows(Output output, int64_t stride, int64_t traffic)
      : data(static_cast<T*>(output.data)),
        stride(stride),
        past_caches(traffic > 2 * kCache && reinterpret_cast<uintptr_t>(data) % (W * sizeof(T)) == 0 &&
                    stride % W == 0) {}

  RowWriter<T> operator[](int64_t row) const { return {data ? data + row * stride : nullptr, past_caches}; }
};

// The first element of the row of weights for a row of x. The plain case divides nothing.
int64_t weights_of(RowMap weight_rows, int64_t row, int64_t cols) {
  return weight_rows.count == 1 ? 0 : row / weight_rows.inner % weight_rows.count * cols;
}

// A row of weights, which are f32 here with the offset of scale in it. An absent one is the constant that changes no
// bit.
struct Weight {
  const float* data;
  float absent;

  Weight(Input weight, float absent, int64_t begin = 0)
      : data(weight ? static_cast<const float*>(weight.data) + begin : nullptr), absent(absent) {}

  template <class Extent>
  Vec operator()(int64_t column, Extent extent) const {
    return data ? load(data + column, extent) : broadcast(absent);
  }
};

// x_hat * scale + bias
struct Affine {
  Weight scale, bias;

  Affine(Input scale, Input bias, int64_t begin = 0) : scale(scale, 1, begin), bias(bias, -0.f, begin) {}

  template <class Extent>
  Vec operator()(Vec x_hat, int64_t column, Extent extent) const {
    return fma(x_hat, scale(column, extent), bias(column, extent));
  }
};

}  // namespace
}  // namespace jaxnorm::cpu
