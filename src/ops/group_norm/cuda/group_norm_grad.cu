// The gradients of GroupNorm: the sums of tiles, and dx.
#include "engine/cuda/device.h"
#include "ops/group_norm/cuda/group_tile.cuh"

namespace jaxnorm::cuda {

// Calls f(activation, k, first + k, x_hat, dz) for each of a thread's positions, a few of which are read at once, with
// what is made of its channels. `prepare` reads these while the first positions are on their way.
template <typename X, typename Dy, typename Tile, typename Prepare, typename F>
__device__ void for_each_position(const GroupNormBackward& p, const Tile& tile, const GroupChannels<Tile>& channels,
                                  Prepare prepare, F f) {
  constexpr int N = Tile::N, COUNT = kGroupAtOnce / 2;
  Packed<X, N> x[COUNT];
  Packed<Dy, N> dy[COUNT];
  const auto read = [&](int first) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      x[k] = tile.template read<X>(p.x.data, first + k);
      dy[k] = tile.template read<Dy>(p.dy.data, first + k);
    }
  };
  read(0);
  prepare();
  with_activation<Tile::ALIGNED && std::is_same_v<X, Dy>>(p.activation, [&](auto activation) {
    for (int first = 0; first < tile.count; first += COUNT) {
      if (first > 0) read(first);
#pragma unroll
      for (int k = 0; k < COUNT; ++k) {
        float x_hat[N], dz[N];
        unpack(x[k], x_hat);
        unpack(dy[k], dz);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          x_hat[i] = channels.x_hat(i, x_hat[i]);
          dz[i] = activation.template sloped<Dy>(dz[i], channels.z(i, x_hat[i]));
        }
        f(first + k, x_hat, dz);
      }
    }
  });
}

// For each channel of a tile the sums of dz and of dz * x_hat. What is not there has a dy of 0.
template <typename X, typename Dy, GroupAccess ACCESS>
__global__ void __launch_bounds__(kGroupThreads, kGroupBlocks<X, ACCESS>)
    group_sums_kernel(GroupPlan plan, GroupNormBackward p, float2* parts) {
  using Tile = GroupTile<X, ACCESS>;
  constexpr int N = Tile::N;
  const Tile tile(plan, blockIdx.x);
  GroupChannels<Tile> channels;
  float2 own[N] = {};
  for_each_position<X, Dy>(
      p, tile, channels, [&] { channels.read(p, plan, tile, p.mean, p.rstd, 1); },
      [&](int position, const float (&x_hat)[N], const float (&dz)[N]) {
        if (position >= tile.count) return;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          own[i].x += dz[i];
          own[i].y = fmaf(dz[i], x_hat[i], own[i].y);
        }
      });
  merge_rows(own, 0.0f, plan.width,
             [](const float2& a, const float2& b, float, float) { return make_float2(a.x + b.x, a.y + b.y); });
  tile.write_part(plan, own, parts);
}

constexpr int kWeightCols = 32;  // of a block

// The sums over the examples that have this row of the weight, of one of the two numbers that each has for a channel.
// `block`: of the `blocks` that all rows have.
template <typename F>
__device__ void sum_weight(const GroupPlan& plan, const GroupWeight& weight, const Output& to, int64_t examples,
                           unsigned block, unsigned blocks, F number) {
  constexpr int step = kGroupThreads / kWeightCols;
  const unsigned blocks_a_row = static_cast<unsigned>((plan.channels + kWeightCols - 1) / kWeightCols);
  const int64_t row = block / blocks_a_row, examples_a_row = examples / (blocks / blocks_a_row);
  const int first = static_cast<int>(threadIdx.x) / kWeightCols;
  const int64_t channel = int64_t{block % blocks_a_row} * kWeightCols + threadIdx.x % kWeightCols;
  float own = 0;
#pragma unroll 4
  for (int64_t n = first; n < examples_a_row; n += step)
    if (channel < plan.channels) own += number(weight.map.example(row, n) * plan.chunks * plan.channels + channel);
  __shared__ float sums[kGroupThreads];
  sums[threadIdx.x] = own;
  __syncthreads();
  if (first > 0 || channel >= plan.channels) return;
  for (int i = 1; i < step; ++i) own += sums[i * kWeightCols + threadIdx.x];
  store_float(to, row * plan.channels + channel, own);
}

// `kept`: for each channel of each example the sums of dz and of dz * x_hat, and for each group the means of g and of
// g * x_hat. The first blocks have the gradients of weights, which have little to do and much to wait for.
template <typename X, typename Dy, GroupAccess ACCESS>
__global__ void __launch_bounds__(kGroupThreads, kGroupBlocks<X, ACCESS>)
    group_dx_kernel(GroupPlan plan, GroupNormBackward p, GroupParts kept, unsigned of_scale, unsigned of_weights) {
  using Tile = GroupTile<X, ACCESS>;
  constexpr int N = Tile::N, GROUPS = Tile::GROUPS;
  if (blockIdx.x < of_scale)
    return sum_weight(plan, p.scale, p.dscale, p.examples, blockIdx.x, of_scale,
                      [&](int64_t i) { return kept.of_channels[i].y; });
  if (blockIdx.x < of_weights)
    return sum_weight(plan, p.bias, p.dbias, p.examples, blockIdx.x - of_scale, of_weights - of_scale,
                      [&](int64_t i) { return kept.of_channels[i].x; });
  const Tile tile(plan, gridDim.x - 1 - blockIdx.x);
  GroupChannels<Tile> channels;
  float2 mean_of[GROUPS];
  const auto prepare = [&] {
    channels.read(p, plan, tile, p.mean, p.rstd, 1);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) mean_of[i] = kept.of_groups[i < tile.remaining ? tile.group(p, i) : 0];
  };
  const auto write = [&](int position, const float (&x_hat)[N], const float (&dz)[N]) {
    float dx[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float2 mean = mean_of[i % GROUPS];
      dx[i] = fmaf(-x_hat[i], mean.y, fmaf(dz[i], channels.factor[i], -mean.x)) * channels.rstd[i % GROUPS];
    }
    tile.template write<X>(p.dx.data, position, dx);
  };
  for_each_position<X, Dy>(p, tile, channels, prepare, write);
}

// How many rows of channels a weight has.
inline int64_t rows_of(const GroupWeight& weight) {
  int64_t rows = 1;
  for (int axis = 0; axis < weight.map.axes; ++axis)
    if (weight.map.stride[axis]) rows *= weight.map.extent[axis];
  return rows;
}

inline int64_t weight_blocks(const Output& gradient, const GroupWeight& weight, const GroupPlan& plan) {
  return gradient ? rows_of(weight) * ((plan.channels + kWeightCols - 1) / kWeightCols) : 0;
}

template <typename X>
cudaError_t run_group_sums(const GroupNormBackward& p, const GroupPlan& plan, cudaStream_t stream) {
  return with_partner<X>(p.dy.dtype, [&](auto type) {
    using Dy = decltype(type);
    return with_access<X, Dy>(
        p,
        [&](auto access) {
          return launch_tiles(group_sums_kernel<X, Dy, access>, plan, p.examples, stream, p,
                              GroupParts(p, plan).of_channels);
        },
        p.x, p.dy, p.scale, p.bias);
  });
}

template <typename X>
cudaError_t run_group_dx(const GroupNormBackward& p, const GroupPlan& plan, cudaStream_t stream) {
  const int64_t of_scale = weight_blocks(p.dscale, p.scale, plan);
  const int64_t of_weights = of_scale + weight_blocks(p.dbias, p.bias, plan);
  const int64_t blocks = of_weights + (p.dx ? plan.tiles(p.examples) : 0);
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  if (blocks == 0) return cudaSuccess;
  return with_partner<X>(p.dy.dtype, [&](auto type) {
    using Dy = decltype(type);
    return with_access<X, Dy>(
        p,
        [&](auto access) {
          return launch_grid(group_dx_kernel<X, Dy, access>, dim3(static_cast<unsigned>(blocks)), dim3(kGroupThreads),
                             stream, plan, p, GroupParts(p, plan), static_cast<unsigned>(of_scale),
                             static_cast<unsigned>(of_weights));
        },
        p.x, p.dy, p.dx, p.scale, p.bias);
  });
}

template <typename X>
cudaError_t run_group_norm_grad(const GroupNormBackward& p, const GroupPlan& plan, cudaStream_t stream) {
  if (p.examples == 0) return run_group_dx<X>(p, plan, stream);
  cudaError_t error = run_group_sums<X>(p, plan, stream);
  if (error == cudaSuccess) error = merge_group_sums(p, plan, stream);
  return error == cudaSuccess ? run_group_dx<X>(p, plan, stream) : error;
}

Outcome run(const GroupNormBackward& p, Stream stream) {
  const GroupPlan plan = group_plan_of(p);
  if (plan.chunks == 0 && p.examples > 0) return {cudaErrorMemoryAllocation};
  return {with_dtype(p.x.dtype, [&](auto type) { return run_group_norm_grad<decltype(type)>(p, plan, stream); })};
}

}  // namespace jaxnorm::cuda
