// The row engine: loops over rows in vectors, with the op given as functors.
//
//   load(row, column, extent)         -> Vec    what enters: x, or the sum of x and a residual
//   Stats::of<R>(load, cols, epsilon) -> Stats  one or two passes over R rows, the later ones from cache
//   stats.x_hat(x)                    -> Vec    what the epilogue starts from, in the pass that writes
//
// An extent is Whole or Part, see vector.h: a functor is generic in it and compiled for both.
#pragma once

#include "cpu/vector.h"
#include "norm.h"

namespace jaxnorm::cpu {
namespace {

// Inlined always: what f has captured would otherwise be read again after each write.
template <class F>
[[gnu::always_inline]] inline void for_each_vector(int64_t cols, F f) {
  int64_t column = 0;
  for (; column + W <= cols; column += W) f(column, Whole{});
  if (column < cols) f(column, Part{cols - column});
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

// R rows of x or dy, of which the last stands for those beyond `count` too.
template <int R, class T>
struct Rows {
  const T* data[R];

  // Rows begin `stride` elements apart.
  Rows(Input input, int64_t stride, int64_t first, int64_t count) {
    for (int row = 0; row < R; ++row) {
      data[row] = static_cast<const T*>(input.data) + (first + (row < count ? row : count - 1)) * stride;
    }
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

// Whether a result goes past the caches: if whoever reads it would not find much of it there, and all its whole vectors
// are aligned as stream() wants them, rows being `stride` elements apart.
bool is_streamed(int64_t traffic, Output output, int64_t stride) {
  const int size = size_of(output.dtype);
  return traffic > 2 * kCache && reinterpret_cast<uintptr_t>(output.data) % (W * size) == 0 && stride % W == 0;
}

// One row of x or dy in the pass that writes. What the next rows' first pass will read is asked for meanwhile, where it
// has to come from memory: that pass does nothing but wait for it.
template <class T>
struct LastPass {
  const T* data;
  int64_t ahead;  // in elements; 0: nothing is asked for

  template <class Extent>
  Vec operator()(int64_t column, Extent extent) const {
    if (ahead) __builtin_prefetch(data + column + ahead);
    return load(data + column, extent);
  }
};

// One row of y or dx. Past the caches, a line of memory is not read before it is written.
template <class T>
struct Result {
  T* data;
  bool past_caches;

  void operator()(int64_t column, Vec v, Whole whole) const {
    if (past_caches) {
      stream(data + column, v);
    } else {
      store(data + column, v, whole);
    }
  }
  void operator()(int64_t column, Vec v, Part part) const { store(data + column, v, part); }
};

// Where in scale, bias and their sums the weights of a row of x begin. The plain case divides nothing.
int64_t weights_of(RowMap weight_rows, int64_t row, int64_t cols) {
  return weight_rows.count == 1 ? 0 : row / weight_rows.inner % weight_rows.count * cols;
}

// Scale or bias. An absent one is the constant that changes no bit.
struct Weight {
  const float* data;
  float absent;
  template <class Extent>
  Vec operator()(int64_t column, Extent extent) const {
    return data ? load(data + column, extent) : broadcast(absent);
  }
};

// x_hat = x * rstd, of the root mean square.
struct Rms {
  static constexpr bool centred = false;
  float rstd;

  Vec x_hat(Vec x) const { return x * rstd; }

  template <int R, class Load>
  static void of(Load load, int64_t cols, float epsilon, Rms* stats) {
    const auto square = sum<R, 1>(cols, [&](int row, int64_t column, auto extent, Vec* sums) {
      const Vec x = load(row, column, extent);
      sums[0] = fma(x, x, sums[0]);
    });
    for (int row = 0; row < R; ++row) {
      stats[row] = {static_cast<float>(1 / __builtin_sqrt(square.mean(row, 0) + epsilon))};
    }
  }
};

// x_hat = (x - mean) * rstd. Around the mean as far as f32 holds it, the second pass sums what is left of the mean
// along with the squares: `shift` puts that right in x_hat, so that a large mean costs no accuracy.
struct Layer {
  static constexpr bool centred = true;
  float mean, rstd, shift;

  Vec x_hat(Vec x) const { return fma(x - mean, broadcast(rstd), broadcast(shift)); }

  template <int R, class Load>
  static void of(Load load, int64_t cols, float epsilon, Layer* stats) {
    const auto value =
        sum<R, 1>(cols, [&](int row, int64_t column, auto extent, Vec* sums) { sums[0] += load(row, column, extent); });
    float centre[R];
    for (int row = 0; row < R; ++row) centre[row] = value.mean(row, 0);
    const auto rest = sum<R, 2>(cols, [&](int row, int64_t column, auto extent, Vec* sums) {
      const Vec d = within(load(row, column, extent) - centre[row], extent);
      sums[0] += d;
      sums[1] = fma(d, d, sums[1]);
    });
    for (int row = 0; row < R; ++row) {
      const double left = rest.mean(row, 0);
      const double variance = rest.mean(row, 1) - left * left;
      const double rstd = 1 / __builtin_sqrt((variance < 0 ? 0 : variance) + epsilon);
      const double exact = centre[row] + left;
      const float mean = exact;
      stats[row] = {mean, static_cast<float>(rstd), static_cast<float>((mean - exact) * rstd)};
    }
  }
};

}  // namespace
}  // namespace jaxnorm::cpu
