// What has to be known of a whole row before its result can be computed. A Stats has
//
//   Part, TicketPart                 what a share of a row comes down to, as ThreadGroup merges it (thread_group.cuh)
//   warp_part<Tile>(row, group, cols)   the share of this warp, which has `cols` columns
//   Statistics                       what the epilogue gets, and
//   finish(p, whole, reciprocal_cols)   how it follows from the Part of the whole row
//   write(p, s, row)                 stores what the call wants of it
#pragma once

#include "engine/cuda/fragment.cuh"

namespace jaxnorm::cuda {

// Calls add(sum, values, remaining) for each vector of this thread, and adds up the sums of the warp.
template <typename Tile, typename Row, typename Group, typename F>
__device__ float sum_over_warp(const Row& x, const Group& group, F add) {
  Sum<Tile> sum;
  for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
    float values[Tile::N];
    x.get(vec, col, remaining, values);
    add(sum, values, remaining);
  });
  return static_cast<float>(group.warp_sum(sum.value()));
}

// The sum of squares.
struct SquareSum {
  using Part = Sums<1>;
  using TicketPart = TicketSum;

  template <typename Tile, typename Row, typename Group>
  __device__ static Part warp_part(const Row& x, const Group& group, float) {
    return {{sum_over_warp<Tile>(x, group,
                                 [](Sum<Tile>& sum, const auto& values, int) { sum.add_products(values, values); })}};
  }
};

// RMSNorm's: 1 / sqrt(mean(x^2) + epsilon).
struct MeanSquare : SquareSum {
  static constexpr bool kCentred = false;  // whether a mean is subtracted

  struct Statistics {
    float rstd;
    __device__ float x_hat(float x) const { return x * rstd; }
  };

  template <typename P, typename Whole>
  __device__ static Statistics finish(const P& p, const Whole& whole, float reciprocal_cols) {
    return {reciprocal_sqrt(fmaf(whole.value[0], reciprocal_cols, p.epsilon))};
  }

  template <typename P>
  __device__ static void write(const P& p, const Statistics& s, int64_t row) {
    if (p.rstd) p.rstd[row] = s.rstd;
  }

  __device__ static Part joined(const Part& a, const Part& b) { return {{a.value[0] + b.value[0]}}; }

  // Of rows that are sharded over devices.
  template <typename P>
  __device__ static void write_shard(const P& p, const Part& shard, float reciprocal_cols, int64_t row) {
    p.variance[row] = shard.value[0] * reciprocal_cols;
  }
};

// LayerNorm's: the mean and 1 / sqrt(variance + epsilon). The squares of a warp's columns are those about its own mean,
// so that E[x^2] - mean^2 is never formed.
struct MeanVariance {
  static constexpr bool kCentred = true;
  using Part = Moments;
  using TicketPart = Moments;

  struct Statistics {
    float mean, rstd;
    __device__ float x_hat(float x) const { return (x - mean) * rstd; }
  };

  template <typename Tile, typename Row, typename Group>
  __device__ static Part warp_part(const Row& x, const Group& group, float cols) {
    const float mean = sum_over_warp<Tile>(x, group, [](Sum<Tile>& sum, const auto& values, int) { sum.add(values); }) *
                       reciprocal(cols);
    const float squares = sum_over_warp<Tile>(x, group, [&](Sum<Tile>& sum, auto& values, int remaining) {
      // Columns past the row's end, which are zero, stay so.
      const float centre = remaining > 0 ? mean : 0.0f;
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) values[i] -= centre;
      if (!Tile::ALIGNED && remaining < Tile::N)
#pragma unroll
        for (int i = 0; i < Tile::N; ++i) values[i] = i < remaining ? values[i] : 0.0f;
      sum.add_products(values, values);
    });
    return {{cols, mean, squares, 0}};
  }

  template <typename P>
  __device__ static Statistics finish(const P& p, const Part& whole, float reciprocal_cols) {
    return {whole.value[1], reciprocal_sqrt(fmaf(whole.value[2], reciprocal_cols, p.epsilon))};
  }

  template <typename P>
  __device__ static void write(const P& p, const Statistics& s, int64_t row) {
    if (!p.rstd) return;
    p.rstd[row] = s.rstd;
    p.mean[row] = s.mean;
  }

  // Chan, Golub and LeVeque 1983. Either may have no columns.
  __device__ static Part joined(const Part& a, const Part& b) {
    if (!(b.value[0] > 0)) return a;
    if (!(a.value[0] > 0)) return b;
    const float count = a.value[0] + b.value[0], share = b.value[0] * reciprocal(count);
    const float distance = b.value[1] - a.value[1];
    const float squares = fmaf(a.value[0] * share * distance, distance, b.value[2]);
    return {{count, fmaf(distance, share, a.value[1]), a.value[2] + squares, 0}};
  }

  template <typename P>
  __device__ static void write_shard(const P& p, const Part& shard, float reciprocal_cols, int64_t row) {
    p.variance[row] = shard.value[2] * reciprocal_cols;
    p.mean[row] = shard.value[1];
  }
};

// Calls f with the Stats of a kind of norm.
template <typename F>
auto with_stats(Kind kind, F f) {
  return kind == Kind::rms ? f(MeanSquare{}) : f(MeanVariance{});
}

}  // namespace jaxnorm::cuda
