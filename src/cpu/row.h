// The row engine: loops over one row in vectors, with the op given as functors.
//
//   load(column, extent)   -> Vec               what enters: x, and later x + residual
//   Stats::of(load, cols)  -> Stats             one or two passes over the row, the later ones from cache
//   epilogue(column, extent, x_hat)             what leaves
//
// An extent is Whole or Part, see vector.h: a functor is generic in it and compiled for both.
#pragma once

#include "cpu/vector.h"
#include "norm.h"

namespace jaxnorm::cpu {
namespace {

template <class F>
void for_each_vector(int64_t cols, F f) {
  int64_t column = 0;
  for (; column + W <= cols; column += W) f(column, Whole{});
  if (column < cols) f(column, Part{cols - column});
}

template <int N>
struct Sums {
  double values[N];
  double reciprocal_cols;  // known before the sums are: a product waits less long for them than a quotient
  double mean(int i) const { return values[i] * reciprocal_cols; }
};

// N sums over a row; add(column, extent, sums) adds one vector's part to each. Accumulators are f32 within blocks of 64
// additions a lane and double across blocks, so that the error does not grow with the row's length.
template <int N, class Add>
Sums<N> sum(int64_t cols, Add add) {
  constexpr int kUnroll = 4;
  constexpr int64_t kBlock = 64 * kUnroll * W;
  Sums<N> total = {{}, 1. / cols};
  for (int64_t begin = 0; begin < cols; begin += kBlock) {
    const int64_t end = cols - begin < kBlock ? cols : begin + kBlock;
    Vec lanes[kUnroll][N] = {};
    int64_t column = begin;
    for (; column + kUnroll * W <= end; column += kUnroll * W) {
      for (int u = 0; u < kUnroll; ++u) add(column + u * W, Whole{}, lanes[u]);
    }
    for (; column + W <= end; column += W) add(column, Whole{}, lanes[0]);
    if (column < end) add(column, Part{end - column}, lanes[0]);
    for (int i = 0; i < N; ++i) {
      total.values[i] += sum_of_lanes((lanes[0][i] + lanes[1][i]) + (lanes[2][i] + lanes[3][i]));
    }
  }
  return total;
}

template <class T>
struct Row {
  T* data;
  template <class Extent>
  Vec operator()(int64_t column, Extent extent) const {
    return load(data + column, extent);
  }
};

// Scale or bias, whose dtype is a run-time value: the branch is the same for every vector and costs nothing beside x.
struct Weight {
  Input input;
  float offset;
  template <class Extent>
  Vec operator()(int64_t column, Extent extent) const {
    switch (input.dtype) {
      case Dtype::f32:
        return load(static_cast<const float*>(input.data) + column, extent) + offset;
      case Dtype::f16:
        return load(static_cast<const F16*>(input.data) + column, extent) + offset;
      default:
        return load(static_cast<const BF16*>(input.data) + column, extent) + offset;
    }
  }
};

// x_hat = x * rstd, of the root mean square.
struct Rms {
  static constexpr bool centred = false;
  float rstd;

  template <class Load>
  static Rms of(Load load, int64_t cols, float epsilon) {
    const auto square = sum<1>(cols, [&](int64_t column, auto extent, Vec* sums) {
      const Vec x = load(column, extent);
      sums[0] = fma(x, x, sums[0]);
    });
    return {static_cast<float>(1 / __builtin_sqrt(square.mean(0) + epsilon))};
  }

  Vec x_hat(Vec x) const { return x * rstd; }
};

// x_hat = (x - mean) * rstd. Around the mean as far as f32 holds it, the second pass sums what is left of the mean
// along with the squares: `shift` puts that right in x_hat, so that a large mean costs no accuracy.
struct Layer {
  static constexpr bool centred = true;
  float mean, rstd, shift;

  template <class Load>
  static Layer of(Load load, int64_t cols, float epsilon) {
    const auto value = sum<1>(cols, [&](int64_t column, auto extent, Vec* sums) { sums[0] += load(column, extent); });
    const float centre = value.mean(0);
    const auto rest = sum<2>(cols, [&](int64_t column, auto extent, Vec* sums) {
      const Vec d = within(load(column, extent) - centre, extent);
      sums[0] += d;
      sums[1] = fma(d, d, sums[1]);
    });
    const double left = rest.mean(0);
    const double variance = rest.mean(1) - left * left;
    const double rstd = 1 / __builtin_sqrt((variance < 0 ? 0 : variance) + epsilon);
    const double exact = centre + left;
    const float mean = exact;
    return {mean, static_cast<float>(rstd), static_cast<float>((mean - exact) * rstd)};
  }

  Vec x_hat(Vec x) const { return fma(x - mean, broadcast(rstd), broadcast(shift)); }
};

}  // namespace
}  // namespace jaxnorm::cpu
