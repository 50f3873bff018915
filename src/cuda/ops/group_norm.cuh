// GroupNorm: the moments of tiles, and the result.
#pragma once

#include "cuda/ops/group_tile.cuh"
#include "cuda/ops/stats.cuh"

namespace jaxnorm::cuda {

// The mean of a channel over positions, and the sum of squares about it; joined as Chan, Golub and LeVeque do, 1983.
struct JoinMoments {
  float share, cross;

  __device__ JoinMoments(float count, float other) {
    share = other > 0 ? other * reciprocal(count + other) : 0.0f;
    cross = count * share;
  }

  __device__ float2 operator()(const float2& a, const float2& b) const {
    const float distance = b.x - a.x;
    return make_float2(fmaf(distance, share, a.x), a.y + fmaf(cross * distance, distance, b.y));
  }
};

// A thread's moments of each of its channels: the squares of the positions that it reads at once are those about their
// own mean.
template <typename X, bool ALIGNED>
__global__ void __launch_bounds__(kGroupThreads) group_moments_kernel(GroupPlan plan, const X* x, float2* parts) {
  using Tile = GroupTile<X>;
  constexpr int N = Tile::N;
  const Tile tile(plan, blockIdx.x);
  float2 own[N] = {};
  float counted = 0;
  for (int64_t position = tile.first; position < tile.end; position += kGroupAtOnce * tile.rows) {
    const int count = tile.template count<kGroupAtOnce>(position);
    Packed<X, N> packed[kGroupAtOnce];
#pragma unroll
    for (int k = 0; k < kGroupAtOnce; ++k)
      packed[k] = load<ALIGNED, N>(x + tile.offset(plan, position + k * tile.rows), k < count ? tile.remaining : 0);
    float2 now[N] = {};
    for_each_value(packed, [&](int, int i, float value) { now[i].x += value; });  // what is not there is zero
    const float share = reciprocal(static_cast<float>(count));
#pragma unroll
    for (int i = 0; i < N; ++i) now[i].x *= share;
    for_each_value(packed, [&](int k, int i, float value) {
      const float off = k < count ? value - now[i].x : 0.0f;
      now[i].y = fmaf(off, off, now[i].y);
    });
    const JoinMoments join(counted, static_cast<float>(count));
#pragma unroll
    for (int i = 0; i < N; ++i) own[i] = join(own[i], now[i]);
    counted += static_cast<float>(count);
  }
  merge_rows(own, counted, plan.width, [](const float2& a, const float2& b, float count, float other) {
    return JoinMoments(count, other)(a, b);
  });
  tile.write(plan, own, parts);
}

template <typename X, typename Y, bool ALIGNED>
__global__ void __launch_bounds__(kGroupThreads)
    group_apply_kernel(GroupPlan plan, GroupNormForward p, const float* mean, const float* rstd, int64_t stride) {
  using Tile = GroupTile<X>;
  constexpr int N = Tile::N;
  const Tile tile(plan, int64_t{gridDim.x} - 1 - blockIdx.x);
  const X* const x = static_cast<const X*>(p.x.data);
  Packed<X, N> packed[kGroupAtOnce];
  const auto read = [&](int64_t position) {
    const int count = tile.template count<kGroupAtOnce>(position);
#pragma unroll
    for (int k = 0; k < kGroupAtOnce; ++k)
      packed[k] = load<ALIGNED, N>(x + tile.offset(plan, position + k * tile.rows), k < count ? tile.remaining : 0);
  };
  read(tile.first);
  const GroupChannels<N> channels = channels_of(p, plan, tile, mean, rstd, stride);
  for (int64_t position = tile.first; position < tile.end;) {
    const int count = tile.template count<kGroupAtOnce>(position);
#pragma unroll
    for (int k = 0; k < kGroupAtOnce; ++k) {
      float values[N];
      unpack(packed[k], values);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = activate<Y>(p.activation, channels.z(i, channels.x_hat(i, values[i])));
      store<ALIGNED>(static_cast<Y*>(p.y.data) + tile.offset(plan, position + k * tile.rows), pack<Y>(values),
                     k < count ? tile.remaining : 0);
    }
    position += kGroupAtOnce * tile.rows;
    if (position < tile.end) read(position);
  }
}

template <typename X>
cudaError_t run_group_moments(const GroupNormForward& p, const GroupPlan& plan, cudaStream_t stream) {
  return with_alignment<X>(
      plan,
      [&](auto aligned) {
        return launch_tiles(group_moments_kernel<X, aligned>, plan, p.examples, stream, static_cast<const X*>(p.x.data),
                            GroupParts(p, plan).of_channels);
      },
      p.x);
}

template <typename X>
cudaError_t run_group_apply(const GroupNormForward& p, const GroupPlan& plan, cudaStream_t stream) {
  const GroupStatistics stats(p, plan);
  return with_partner<X>(p.y.dtype, [&](auto type) {
    using Y = decltype(type);
    return with_alignment<X>(
        plan,
        [&](auto aligned) {
          return launch_tiles(group_apply_kernel<X, Y, aligned>, plan, p.examples, stream, p, stats.mean, stats.rstd,
                              stats.stride);
        },
        p.x, p.y);
  });
}

template <typename X>
cudaError_t run_group_norm(const GroupNormForward& p, const GroupPlan& plan, cudaStream_t stream) {
  cudaError_t error = run_group_moments<X>(p, plan, stream);
  if (error == cudaSuccess) error = merge_group_moments(p, plan, stream);
  return error == cudaSuccess ? run_group_apply<X>(p, plan, stream) : error;
}

}  // namespace jaxnorm::cuda
