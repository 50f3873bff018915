// One row in the forward: its statistics, and y from them.
#pragma once

#include "cuda/engine/fragment.cuh"

namespace jaxnorm::cuda {

struct Statistics {
  float mean, rstd;
};

template <Kind KIND>
using Part = std::conditional_t<KIND == Kind::rms, Sums<1>, Moments>;

// With room for a note.
template <Kind KIND>
using TicketPart = std::conditional_t<KIND == Kind::rms, TicketSum, Moments>;

// This warp's part of the statistics: the sum of squares, or the moments about the warp's own mean, so that
// E[x^2] - mean^2 is never formed. `cols`: how many columns the warp has.
template <Kind KIND, typename Tile, typename Row, typename T>
__device__ Part<KIND> warp_part(const Row& x, const T& group, float cols) {
  // add(sum, values, left) of each vector.
  const auto sum_over_warp = [&](auto add) {
    Sum<Tile> sum;
    for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
      float values[Tile::N];
      x.get(slot, first, left, values);
      add(sum, values, left);
    });
    return static_cast<float>(group.warp_sum(sum.value()));
  };

  if constexpr (KIND == Kind::rms) {
    return {{sum_over_warp([](Sum<Tile>& sum, const auto& values, int) { sum.add_products(values, values); })}};
  } else {
    const float mean =
        sum_over_warp([](Sum<Tile>& sum, const auto& values, int) { sum.add(values); }) * reciprocal(cols);
    const float squares = sum_over_warp([&](Sum<Tile>& sum, auto& values, int left) {
      // Columns past the row's end, which are zero, stay so.
      const float center = left > 0 ? mean : 0.0f;
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) values[i] -= center;
      if (!Tile::ALIGNED && left < Tile::N)
#pragma unroll
        for (int i = 0; i < Tile::N; ++i) values[i] = i < left ? values[i] : 0.0f;
      sum.add_products(values, values);
    });
    return {{cols, mean, squares, 0}};
  }
}

// Of a whole row.
template <Kind KIND, typename Whole>
__device__ Statistics statistics(const Whole& whole, float reciprocal_cols, float epsilon) {
  constexpr bool kLayer = KIND == Kind::layer;
  const float variance = kLayer ? whole.value[kLayer ? 2 : 0] : whole.value[0];
  return {kLayer ? whole.value[kLayer] : 0.0f, reciprocal_sqrt(fmaf(variance, reciprocal_cols, epsilon))};
}

template <Kind KIND>
__device__ void write_statistics(Statistics s, int64_t row, float* mean, float* rstd) {
  if (!rstd) return;
  rstd[row] = s.rstd;
  if (KIND == Kind::layer) mean[row] = s.mean;
}

// The same of a thread group's row, which its thread 0 writes where they are wanted.
template <Kind KIND, typename T>
__device__ Statistics statistics(const Forward& p, T& group, int64_t row) {
  const Statistics s = statistics<KIND>(group.collect(), group.reciprocal(), p.epsilon);
  if (group.rank + group.begin == 0 && row < p.rows) write_statistics<KIND>(s, row, p.mean, p.rstd);
  return s;
}

template <Kind KIND>
__device__ float x_hat(float x, Statistics s) {
  return (KIND == Kind::layer ? x - s.mean : x) * s.rstd;
}

// What the compiler knows of a call, so that nothing stands between the loads of weights: y is of x's type, the weights
// that there are of type T, a scale is among them, BIAS tells whether there is a bias, and ROUND whether x_hat is
// rounded before the multiplication. ADDED: x's type, if a residual is added to it; void: there is none.
template <typename T, bool BIAS, bool ROUND, typename ADDED = void>
struct Specialised {
  using Weight = T;
  static constexpr bool kSpecialised = true, kBias = BIAS, kRound = ROUND, kAdds = !std::is_void_v<ADDED>,
                        kPerHead = false, kGates = false, kFirst = false;
  // Of y and of what is added, where rows are of X.
  template <typename X>
  using Result = std::conditional_t<kAdds, ADDED, X>;
};

// Of several heads.
template <typename C>
struct PerHead : C {
  static constexpr bool kPerHead = true;
};

// Everything else, seen at run time.
struct Generic {
  static constexpr bool kSpecialised = false, kAdds = false, kPerHead = false, kGates = false, kFirst = false;
  template <typename X>
  using Result = X;
};

// Rows that a thread group has under way at once.
template <typename R, typename C>
constexpr int kRowsAtOnce = R::template kRows < C::kAdds || C::kGates ? 2 : 1 > ;

// What a kernel knows of a call. Where rows come by way of pipelines weights are held as floats, whatever type they
// have.
template <typename X, Access ACCESS, typename C>
struct Seen {
  using Specialised = C;
};
template <typename X, typename T, bool BIAS, bool ROUND, typename ADDED>
struct Seen<X, Access::pipelined, Specialised<T, BIAS, ROUND, ADDED>> {
  using Specialised = cuda::Specialised<X, BIAS, ROUND, ADDED>;
};
template <typename X, typename T, bool BIAS, bool ROUND, typename ADDED>
struct Seen<X, Access::pipelined_scalar, Specialised<T, BIAS, ROUND, ADDED>> {
  using Specialised = cuda::Specialised<X, BIAS, ROUND, ADDED>;
};

// y = x_hat * factor + term of a vector, in place of x. factor: scale + scale_offset; term: bias, if there is one.
template <Kind KIND, typename Y, typename C, int N>
__device__ void finish(Statistics s, const float (&factor)[N], const float (&term)[N], float (&y)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = x_hat<KIND>(y[i], s);
  if constexpr (C::kRound) unpack(pack<Y>(y), y);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = C::kBias ? fmaf(y[i], factor[i], term[i]) : y[i] * factor[i];
}

// The same of N columns whose types are seen at run time. `x` is the row of x in memory, `weights_at` where the
// weights' row begins.
template <Kind KIND, int N, typename X>
__device__ void finish_generic(const Forward& p, Statistics s, const X* x, int64_t weights_at, int64_t first,
                               float (&y)[N]) {
  float factor[N], term[N];
  unpack(load<true, N>(x + first, N), y);
  if (p.scale.data) load_floats<true>(p.scale, weights_at + first, N, factor);
  if (p.bias.data) load_floats<true>(p.bias, weights_at + first, N, term);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    y[i] = x_hat<KIND>(y[i], s);
    if (!p.multiply_before_cast) y[i] = round_to(p.y.dtype, y[i]);
    y[i] = fmaf(y[i], p.scale.data ? factor[i] + p.scale_offset : 1.0f, p.bias.data ? term[i] : -0.0f);
  }
}

// The zeros after a row of y.
template <int N, typename T>
__device__ void pad_row(const Forward& p, const Output& y, const T& group, int64_t row) {
  if (p.y_pad == 0 || group.begin > 0) return;
  const float zeros[N] = {};
  const int64_t end = (row + 1) * (p.cols + p.y_pad);
#pragma unroll 1
  for (int64_t at = end - p.y_pad + group.rank * N; at < end; at += group.threads * N) store_floats(y, at, zeros);
}

// And of a whole row. Vector by vector in a loop, or there would be as many kernels as types, or large ones.
template <Kind KIND, typename Tile, typename X, typename T>
__device__ void finish_row_generic(const Forward& p, const RowMapLaunch& weight_rows, const T& group, Statistics s,
                                   int64_t row, const X* x) {
  constexpr int N = Tile::ALIGNED ? Tile::N : 1;
  const int64_t step = int64_t{group.threads} * N, weights_at = weight_rows.of_row(row) * p.cols;
  for (int64_t first = group.begin + group.rank * N; first < group.end; first += step) {
    float y[N];
    finish_generic<KIND>(p, s, x, weights_at, first, y);
    store_floats(p.y, row * (p.cols + p.y_pad) + first, y);
  }
  pad_row<N>(p, p.y, group, row);
}

}  // namespace jaxnorm::cuda
