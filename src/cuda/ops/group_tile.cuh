// A block's tile of x: a chunk of an example's positions and a slice of its channels. A thread has a vector of channels
// of every `rows`-th position.
#pragma once

#include "cuda/engine/launch.cuh"
#include "cuda/ops/group_activation.cuh"
#include "cuda/ops/group_norm.h"

namespace jaxnorm::cuda {

template <typename X>
struct GroupTile {
  static constexpr int N = kVector<X>;

  int64_t example, first, end;  // positions of this thread
  int64_t channel;              // of its vector the first
  int chunk, row, rows, remaining;

  // `tile`: its number, by which slices run fastest and examples slowest.
  __device__ GroupTile(const GroupPlan& plan, int64_t tile)
      : row(static_cast<int>(threadIdx.x) / plan.width), rows(kGroupThreads / plan.width) {
    const int64_t slice = tile % plan.slices, chunk_of_all = tile / plan.slices;
    example = chunk_of_all / plan.chunks;
    chunk = static_cast<int>(chunk_of_all % plan.chunks);
    first = chunk * plan.chunk + row;
    end = min((chunk + 1) * plan.chunk, plan.positions);
    channel = (slice * plan.width + threadIdx.x % plan.width) * N;
    remaining = static_cast<int>(min(int64_t{N}, max(int64_t{0}, plan.channels - channel)));
  }

  // Of an array of x's shape.
  __device__ int64_t offset(const GroupPlan& plan, int64_t position) const {
    return (example * plan.positions + position) * plan.channels + channel;
  }

  // Writes what the threads of the first row have, to an array with an element for each channel of each chunk.
  __device__ void write(const GroupPlan& plan, const float2 (&own)[N], float2* parts) const {
    float2* const to = parts + (example * plan.chunks + chunk) * plan.channels + channel;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (row == 0 && i < remaining) to[i] = own[i];
  }

  // How many of this thread's next AT_ONCE positions there are.
  template <int AT_ONCE>
  __device__ int count(int64_t position) const {
    return static_cast<int>(min(int64_t{AT_ONCE}, (end - position + rows - 1) / rows));
  }
};

// Calls f(k, i, value) for the i-th value of the k-th vector.
template <typename X, int N, int COUNT, typename F>
__device__ void for_each_value(const Packed<X, N> (&packed)[COUNT], F f) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    float values[N];
    unpack(packed[k], values);
#pragma unroll
    for (int i = 0; i < N; ++i) f(k, i, values[i]);
  }
}

// What a thread has to know of each of its channels.
template <int N>
struct GroupChannels {
  float mean[N], rstd[N], factor[N], bias[N];

  __device__ float x_hat(int i, float x) const { return (x - mean[i]) * rstd[i]; }
  __device__ float z(int i, float x_hat) const { return fmaf(x_hat, factor[i], bias[i]); }
};

__device__ inline float weight_at(const GroupWeight& weight, int64_t row, int64_t channels, int64_t channel) {
  float value[1];
  load_floats<false, 1>(weight, row * channels + channel, 1, value);
  return value[0];
}

// factor is scale + scale_offset, and 1 without a scale.
template <typename Tile, typename Op>
__device__ GroupChannels<Tile::N> channels_of(const Op& p, const GroupPlan& plan, const Tile& tile, const float* mean,
                                              const float* rstd, int64_t stride) {
  GroupChannels<Tile::N> channels{};
  const int64_t scale_row = p.scale.map.row(tile.example), bias_row = p.bias.map.row(tile.example);
#pragma unroll
  for (int i = 0; i < Tile::N; ++i) {
    if (i >= tile.remaining) continue;
    const int64_t channel = tile.channel + i, group = tile.example * p.groups + channel / p.group_size;
    channels.mean[i] = mean[group * stride];
    channels.rstd[i] = rstd[group * stride];
    channels.factor[i] = p.scale.data ? weight_at(p.scale, scale_row, plan.channels, channel) + p.scale_offset : 1.0f;
    channels.bias[i] = p.bias.data ? weight_at(p.bias, bias_row, plan.channels, channel) : -0.0f;
  }
  return channels;
}

// Merges what the threads of a block have of the same channels, in a fixed order, in those of the first row. `count`:
// of how many positions a thread has it; merge(a, b, count of a, count of b) merges two of them.
template <int N, typename F>
__device__ void merge_rows(float2 (&own)[N], float count, int width, F merge) {
  __shared__ float2 parts[N * kGroupThreads];
  __shared__ float counts[kGroupThreads];
  const int thread = threadIdx.x;
  for (int half = kGroupThreads / 2; half >= width; half /= 2) {
    if (thread >= half && thread < 2 * half) {
      counts[thread] = count;
#pragma unroll
      for (int i = 0; i < N; ++i) parts[i * kGroupThreads + thread] = own[i];
    }
    __syncthreads();
    if (thread < half) {
      const float other = counts[thread + half];
#pragma unroll
      for (int i = 0; i < N; ++i) own[i] = merge(own[i], parts[i * kGroupThreads + thread + half], count, other);
      count += other;
    }
  }
}

// Where the statistics are: in the results, or where they are not wanted in the workspace.
struct GroupStatistics {
  float *mean, *rstd;
  int64_t stride;  // from a group to the next

  GroupStatistics(const GroupNormForward& p, const GroupPlan& plan) : mean(p.mean), rstd(p.rstd), stride(1) {
    if (mean) return;
    mean = &GroupParts(p, plan).of_groups->x;
    rstd = mean + 1;
    stride = 2;
  }
};

// Calls f with a value of the type of y or dy.
template <typename X, typename F>
cudaError_t with_partner(Dtype dtype, F f) {
  if (dtype == kDtype<X>) return f(X{});
  if constexpr (std::is_same_v<X, float>) {
    return dtype == Dtype::f16 ? f(__half{}) : f(__nv_bfloat16{});
  } else {
    return f(float{});
  }
}

// Calls f with whether vectors are aligned, as a type: all arrays are, and vectors divide the channels.
template <typename X, typename F, typename... Arrays>
cudaError_t with_alignment(const GroupPlan& plan, F f, const Arrays&... arrays) {
  constexpr int N = kVector<X>;
  if (plan.channels % N == 0 && are_aligned<N>(arrays...)) return f(std::true_type{});
  return f(std::false_type{});
}

// A tile a block.
template <typename Kernel, typename... Args>
cudaError_t launch_tiles(Kernel kernel, const GroupPlan& plan, int64_t examples, cudaStream_t stream,
                         const Args&... args) {
  const int64_t tiles = plan.tiles(examples);
  if (tiles > INT_MAX) return cudaErrorInvalidConfiguration;
  return launch_grid(kernel, dim3(static_cast<unsigned>(tiles)), dim3(kGroupThreads), stream, plan, args...);
}

}  // namespace jaxnorm::cuda
