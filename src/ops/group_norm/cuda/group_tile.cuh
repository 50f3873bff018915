// A block's tile of x: a chunk of an example's positions and a slice of its channels. A thread has a vector of channels
// of every `rows`-th position.
#pragma once

#include "engine/cuda/launch.cuh"
#include "ops/group_norm/cuda.h"
#include "ops/group_norm/cuda/group_activation.cuh"

namespace jaxnorm::cuda {

// How a kernel reaches channels: in aligned vectors, each of channels of one group or of several, or in elements.
enum class GroupAccess : uint8_t { whole_groups, vectors, elements };

// How many blocks of a multiprocessor have enough registers.
template <typename X, GroupAccess ACCESS>
constexpr int kGroupBlocks = sizeof(X) < 4 && ACCESS == GroupAccess::whole_groups ? 4 : 3;

template <typename X, GroupAccess ACCESS>
struct GroupTile {
  static constexpr int N = kGroupVector;
  static constexpr bool ALIGNED = ACCESS != GroupAccess::elements;
  // How many groups a vector may have channels of.
  static constexpr int GROUPS = ACCESS == GroupAccess::whole_groups ? 1 : N;

  int example, chunk, channel;  // the channel that is the first of this thread's vector
  int row, rows, remaining;
  int count;      // how many positions this thread has
  int64_t start;  // the first of its elements in an array of x's shape
  int64_t step;   // elements to its next position

  // `tile`: its number, by which slices run fastest and examples slowest.
  __device__ GroupTile(const GroupPlan& plan, unsigned tile)
      : row(static_cast<int>(threadIdx.x) / plan.width), rows(kGroupThreads / plan.width) {
    const unsigned chunk_of_all = tile / plan.slices;
    example = static_cast<int>(chunk_of_all / plan.chunks);
    chunk = static_cast<int>(chunk_of_all % plan.chunks);
    channel = (static_cast<int>(tile % plan.slices) * plan.width + static_cast<int>(threadIdx.x) % plan.width) * N;
    remaining = max(0, min(N, static_cast<int>(plan.channels) - channel));
    const int64_t first = chunk * plan.chunk + row;
    const int64_t end = min((chunk + 1) * plan.chunk, plan.positions);
    count = static_cast<int>(max(int64_t{0}, end - first + rows - 1)) / rows;
    start = (example * plan.positions + first) * plan.channels + channel;
    step = rows * plan.channels;
  }

  // The i-th of this thread's vectors; zeros where it has none.
  template <typename T>
  __device__ Packed<T, N> read(const void* from, int i) const {
    return load<ALIGNED, N>(static_cast<const T*>(from) + start + i * step, i < count ? remaining : 0);
  }

  template <typename T>
  __device__ void write(void* to, int i, const float (&values)[N]) const {
    store<ALIGNED>(static_cast<T*>(to) + start + i * step, pack<T>(values), i < count ? remaining : 0);
  }

  // Writes what the threads of the first row have, to an array with an element for each channel of each chunk.
  __device__ void write_part(const GroupPlan& plan, const float2 (&own)[N], float2* parts) const {
    float2* const to = parts + (int64_t{example} * plan.chunks + chunk) * plan.channels + channel;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (row == 0 && i < remaining) to[i] = own[i];
  }

  // The i-th channel's group, among those of all examples.
  __device__ int64_t group(const Groups& p, int i) const {
    return int64_t{example} * p.groups + static_cast<unsigned>(channel + i) / static_cast<unsigned>(p.group_size);
  }
};

// A weight for each of a thread's channels.
template <typename Tile>
__device__ void read_weight(const GroupWeight& weight, const GroupPlan& plan, const Tile& tile,
                            float (&values)[Tile::N]) {
  const int64_t row = weight.map.axes == 0 ? 0 : weight.map.row(tile.example);
  load_floats<Tile::ALIGNED>(weight, row * plan.channels + tile.channel, tile.remaining, values);
}

// What a thread has to know of its channels: factor is scale + scale_offset, and 1 without a scale.
template <typename Tile>
struct GroupChannels {
  static constexpr int N = Tile::N;
  float mean[Tile::GROUPS], rstd[Tile::GROUPS], factor[N], bias[N];

  template <typename Op>
  __device__ void read(const Op& p, const GroupPlan& plan, const Tile& tile, const float* means, const float* rstds,
                       int64_t stride) {
#pragma unroll
    for (int i = 0; i < Tile::GROUPS; ++i) {
      const int64_t group = i < tile.remaining ? tile.group(p, i) * stride : 0;
      mean[i] = means[group];
      rstd[i] = rstds[group];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) factor[i] = 1.0f, bias[i] = -0.0f;
    if (p.scale.data) {
      read_weight(p.scale, plan, tile, factor);
#pragma unroll
      for (int i = 0; i < N; ++i) factor[i] += p.scale_offset;
    }
    if (p.bias.data) read_weight(p.bias, plan, tile, bias);
  }

  __device__ float x_hat(int i, float x) const { return (x - mean[i % Tile::GROUPS]) * rstd[i % Tile::GROUPS]; }
  __device__ float z(int i, float x_hat) const { return fmaf(x_hat, factor[i], bias[i]); }
};

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

template <GroupAccess ACCESS>
using GroupAccessAs = std::integral_constant<GroupAccess, ACCESS>;

// Calls f with how the channels are reached, as a type. Of arrays of two dtypes vectors have whole groups or not, as it
// comes.
template <typename X, typename Partner = X, typename F, typename... Arrays>
cudaError_t with_access(const Groups& p, F f, const Arrays&... arrays) {
  constexpr int N = kGroupVector;
  if (p.channels() % N != 0 || !are_aligned<N>(arrays...)) return f(GroupAccessAs<GroupAccess::elements>{});
  if constexpr (std::is_same_v<X, Partner>)
    if (p.group_size % N == 0) return f(GroupAccessAs<GroupAccess::whole_groups>{});
  return f(GroupAccessAs<GroupAccess::vectors>{});
}

// A tile a block.
template <typename Kernel, typename... Args>
cudaError_t launch_tiles(Kernel kernel, const GroupPlan& plan, int64_t examples, cudaStream_t stream,
                         const Args&... args) {
  const int64_t tiles = plan.tiles(examples);
  if (tiles > INT_MAX || plan.channels > INT_MAX / 2) return cudaErrorInvalidConfiguration;
  return launch_grid(kernel, dim3(static_cast<unsigned>(tiles)), dim3(kGroupThreads), stream, plan, args...);
}

}  // namespace jaxnorm::cuda
