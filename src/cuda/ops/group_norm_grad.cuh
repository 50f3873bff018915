// The gradients of GroupNorm: the sums of tiles, and dx.
#pragma once

#include "cuda/ops/group_tile.cuh"

namespace jaxnorm::cuda {

// x and dy of a few of a thread's positions.
template <typename X, typename Dy, bool ALIGNED>
struct GroupOperands {
  static constexpr int N = kVector<X>, kAtOnce = kGroupAtOnce / 2;
  Packed<X, N> x[kAtOnce];
  Packed<Dy, N> dy[kAtOnce];
  int count;

  template <typename Tile>
  __device__ void read(const GroupNormBackward& p, const GroupPlan& plan, const Tile& tile, int64_t position) {
    count = tile.template count<kAtOnce>(position);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t offset = tile.offset(plan, position + k * tile.rows);
      const int remaining = k < count ? tile.remaining : 0;
      x[k] = load<ALIGNED, N>(static_cast<const X*>(p.x.data) + offset, remaining);
      dy[k] = load<ALIGNED, N>(static_cast<const Dy*>(p.dy.data) + offset, remaining);
    }
  }

  // Calls f(i, x_hat, dz) for each channel of the k-th position.
  template <typename F>
  __device__ void for_each(const GroupNormBackward& p, const GroupChannels<N>& channels, int k, F f) const {
    float x_values[N], dy_values[N];
    unpack(x[k], x_values);
    unpack(dy[k], dy_values);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float x_hat = channels.x_hat(i, x_values[i]);
      f(i, x_hat, dy_values[i] * slope<Dy>(p.activation, channels.z(i, x_hat)));
    }
  }
};

// Calls f(operands, position) for each few of a thread's positions. What f wants to have before it computes, it asks
// for in `prepare`, while the first are on their way.
template <typename Operands, typename Tile, typename Prepare, typename F>
__device__ void for_each_few(const GroupNormBackward& p, const GroupPlan& plan, const Tile& tile, Prepare prepare,
                             F f) {
  Operands operands;
  operands.read(p, plan, tile, tile.first);
  prepare();
  for (int64_t position = tile.first; position < tile.end;) {
    f(operands, position);
    position += Operands::kAtOnce * tile.rows;
    if (position < tile.end) operands.read(p, plan, tile, position);
  }
}

// For each channel of a tile the sums of dz and of dz * x_hat.
template <typename X, typename Dy, bool ALIGNED>
__global__ void __launch_bounds__(kGroupThreads) group_sums_kernel(GroupPlan plan, GroupNormBackward p, float2* parts) {
  using Tile = GroupTile<X>;
  using Operands = GroupOperands<X, Dy, ALIGNED>;
  constexpr int N = Tile::N;
  const Tile tile(plan, blockIdx.x);
  GroupChannels<N> channels;
  float2 own[N] = {};
  for_each_few<Operands>(
      p, plan, tile, [&] { channels = channels_of(p, plan, tile, p.mean, p.rstd, 1); },
      [&](const Operands& operands, int64_t) {
#pragma unroll
        for (int k = 0; k < Operands::kAtOnce; ++k)
          operands.for_each(p, channels, k, [&](int i, float x_hat, float dz) {
            if (k >= operands.count) return;
            own[i].x += dz;
            own[i].y = fmaf(dz, x_hat, own[i].y);
          });
      });
  merge_rows(own, 0.0f, plan.width,
             [](const float2& a, const float2& b, float, float) { return make_float2(a.x + b.x, a.y + b.y); });
  tile.write(plan, own, parts);
}

// `means`: for each group those of g and of g * x_hat.
template <typename X, typename Dy, bool ALIGNED>
__global__ void __launch_bounds__(kGroupThreads)
    group_dx_kernel(GroupPlan plan, GroupNormBackward p, const float2* means) {
  using Tile = GroupTile<X>;
  using Operands = GroupOperands<X, Dy, ALIGNED>;
  constexpr int N = Tile::N;
  const Tile tile(plan, int64_t{gridDim.x} - 1 - blockIdx.x);
  GroupChannels<N> channels;
  float2 mean_of[N] = {};
  for_each_few<Operands>(
      p, plan, tile,
      [&] {
        channels = channels_of(p, plan, tile, p.mean, p.rstd, 1);
#pragma unroll
        for (int i = 0; i < N; ++i)
          if (i < tile.remaining) mean_of[i] = means[tile.example * p.groups + (tile.channel + i) / p.group_size];
      },
      [&](const Operands& operands, int64_t position) {
#pragma unroll
        for (int k = 0; k < Operands::kAtOnce; ++k) {
          float dx[N];
          operands.for_each(p, channels, k, [&](int i, float x_hat, float dz) {
            dx[i] = fmaf(-x_hat, mean_of[i].y, fmaf(dz, channels.factor[i], -mean_of[i].x)) * channels.rstd[i];
          });
          store<ALIGNED>(static_cast<X*>(p.dx.data) + tile.offset(plan, position + k * tile.rows), pack<X>(dx),
                         k < operands.count ? tile.remaining : 0);
        }
      });
}

template <typename X>
cudaError_t run_group_sums(const GroupNormBackward& p, const GroupPlan& plan, cudaStream_t stream) {
  return with_partner<X>(p.dy.dtype, [&](auto type) {
    using Dy = decltype(type);
    return with_alignment<X>(
        plan,
        [&](auto aligned) {
          return launch_tiles(group_sums_kernel<X, Dy, aligned>, plan, p.examples, stream, p,
                              GroupParts(p, plan).of_channels);
        },
        p.x, p.dy);
  });
}

template <typename X>
cudaError_t run_group_dx(const GroupNormBackward& p, const GroupPlan& plan, cudaStream_t stream) {
  return with_partner<X>(p.dy.dtype, [&](auto type) {
    using Dy = decltype(type);
    return with_alignment<X>(
        plan,
        [&](auto aligned) {
          return launch_tiles(group_dx_kernel<X, Dy, aligned>, plan, p.examples, stream, p,
                              GroupParts(p, plan).of_groups);
        },
        p.x, p.dy, p.dx);
  });
}

template <typename X>
cudaError_t run_group_norm_grad(const GroupNormBackward& p, const GroupPlan& plan, cudaStream_t stream) {
  cudaError_t error = p.examples > 0 ? run_group_sums<X>(p, plan, stream) : cudaSuccess;
  if (error == cudaSuccess) error = merge_group_sums(p, plan, stream);
  return error == cudaSuccess && p.dx && p.examples > 0 ? run_group_dx<X>(p, plan, stream) : error;
}

}  // namespace jaxnorm::cuda
