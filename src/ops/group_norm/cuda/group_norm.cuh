// GroupNorm: the moments of tiles, and the result.
#pragma once

#include "ops/group_norm/cuda/group_moments.cuh"
#include "ops/group_norm/cuda/group_tile.cuh"

namespace jaxnorm::cuda {

template <typename X, GroupAccess ACCESS>
__global__ void __launch_bounds__(kGroupThreads, kGroupBlocks<X, ACCESS>)
    group_moments_kernel(GroupPlan plan, const X* x, float2* parts) {
  using Tile = GroupTile<X, ACCESS>;
  constexpr int N = Tile::N, COUNT = kGroupAtOnce;
  const Tile tile(plan, blockIdx.x);
  float2 own[N] = {};
  for (int first = 0; first < tile.count; first += COUNT) {
    Packed<X, N> packed[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) packed[k] = tile.template read<X>(x, first + k);
    const int count = min(COUNT, tile.count - first);
    const float counted = static_cast<float>(count);
    float2 now[N];
    if (count == COUNT) {
      moments_of(packed, counted, [](int) { return true; }, now);
    } else {
      moments_of(packed, counted, [&](int k) { return k < count; }, now);
    }
    const JoinMoments join(static_cast<float>(first), counted);
#pragma unroll
    for (int i = 0; i < N; ++i) own[i] = join(own[i], now[i]);
  }
  merge_rows(
      own, static_cast<float>(tile.count), plan.width,
      [](const float2& a, const float2& b, float count, float other) { return JoinMoments(count, other)(a, b); });
  tile.write_part(plan, own, parts);
}

template <typename X, typename Y, GroupAccess ACCESS>
__global__ void __launch_bounds__(kGroupThreads, kGroupBlocks<X, ACCESS>)
    group_apply_kernel(GroupPlan plan, GroupNormForward p, const float* mean, const float* rstd, int64_t stride) {
  using Tile = GroupTile<X, ACCESS>;
  constexpr int N = Tile::N, COUNT = kGroupAtOnce;
  const Tile tile(plan, gridDim.x - 1 - blockIdx.x);
  Packed<X, N> packed[COUNT];
  const auto read = [&](int first) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) packed[k] = tile.template read<X>(p.x.data, first + k);
  };
  read(0);
  GroupChannels<Tile> channels;
  channels.read(p, plan, tile, mean, rstd, stride);
  with_activation<Tile::ALIGNED && std::is_same_v<X, Y>>(p.activation, [&](auto activation) {
    for (int first = 0; first < tile.count; first += COUNT) {
      if (first > 0) read(first);
#pragma unroll
      for (int k = 0; k < COUNT; ++k) {
        float values[N];
        unpack(packed[k], values);
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = activation.template of<Y>(channels.z(i, channels.x_hat(i, values[i])));
        tile.template write<Y>(p.y.data, first + k, values);
      }
    }
  });
}

template <typename X>
cudaError_t run_group_moments(const GroupNormForward& p, const GroupPlan& plan, cudaStream_t stream) {
  return with_access<X>(
      p,
      [&](auto access) {
        return launch_tiles(group_moments_kernel<X, access>, plan, p.examples, stream, static_cast<const X*>(p.x.data),
                            GroupParts(p, plan).of_channels);
      },
      p.x);
}

template <typename X>
cudaError_t run_group_apply(const GroupNormForward& p, const GroupPlan& plan, cudaStream_t stream) {
  const GroupStatistics stats(p, plan);
  return with_partner<X>(p.y.dtype, [&](auto type) {
    using Y = decltype(type);
    return with_access<X, Y>(
        p,
        [&](auto access) {
          return launch_tiles(group_apply_kernel<X, Y, access>, plan, p.examples, stream, p, stats.mean, stats.rstd,
                              stats.stride);
        },
        p.x, p.y, p.scale, p.bias);
  });
}

template <typename X>
cudaError_t run_group_norm(const GroupNormForward& p, const GroupPlan& plan, cudaStream_t stream) {
  cudaError_t error = run_group_moments<X>(p, plan, stream);
  if (error == cudaSuccess) error = merge_group_moments(p, plan, stream);
  return error == cudaSuccess ? run_group_apply<X>(p, plan, stream) : error;
}

}  // namespace jaxnorm::cuda
