// GroupNorm: the moments of tiles, and the result; and the plan of either direction.
#include <algorithm>

#include "engine/cuda/device.h"
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

Outcome run(const GroupNormForward& p, Stream stream) {
  if (p.examples == 0) return {cudaSuccess};
  const GroupPlan plan = group_plan_of(p);
  if (plan.chunks == 0) return {cudaErrorMemoryAllocation};
  return {with_dtype(p.x.dtype, [&](auto type) { return run_group_norm<decltype(type)>(p, plan, stream); })};
}

GroupPlan make_group_plan(int64_t positions, int64_t groups, int64_t group_size, int64_t floats_a_group) {
  GroupPlan plan{positions, groups * group_size};
  const int64_t vectors = ceil_div(plan.channels, kGroupVector);
  plan.width = 1;
  while (plan.width < kGroupWidth && plan.width < vectors) plan.width *= 2;
  plan.slices = static_cast<int>(ceil_div(vectors, plan.width));

  const int64_t room = std::max<int64_t>(0, floats_a_group / 2 - 1) / group_size;
  if (room < 1) return plan;
  const int64_t least = kGroupThreads / plan.width * kGroupAtOnce * 2;
  const auto are_more_than = [&](int64_t chunks) { return ceil_div(positions, plan.chunk) > chunks; };
  plan.chunk = least;
  while ((are_more_than(kFewChunks) && plan.chunk < 4 * least) || are_more_than(std::min(kMostChunks, room)))
    plan.chunk *= 2;
  plan.chunks = static_cast<int>(ceil_div(positions, plan.chunk));
  plan.floats_a_group = 2 * (plan.chunks * group_size + 1);
  return plan;
}

WorkspaceSize group_norm_workspace(const WorkspaceQuery& query) {
  const auto [groups, group_size] = query.weight_rows;
  return {make_group_plan(query.cols / group_size, groups, group_size).floats_a_group, 0};
}

}  // namespace jaxnorm::cuda
