// How the kernels of GroupNorm share x among blocks, what they keep between launches, and what they share.
//
// x is read twice. Of a tile, a chunk of an example's positions and a slice of its channels, a block gives what each
// channel comes down to; then follows what a group comes down to; and with that y or dx. The last launch begins where
// the first ended, so that it finds in the cache what that read last.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "engine/cuda/launch.cuh"
#include "ops/group_norm/call.h"
#include "ops/shared/cuda/activation.cuh"

namespace jaxnorm::cuda {

constexpr int kGroupThreads = 256;
constexpr int kGroupVector = 4;  // channels of a thread: of more a thread has too many numbers to keep
constexpr int kGroupWidth = 32;  // threads side by side at most
constexpr int kGroupAtOnce = 8;  // positions that a thread reads at once

// A chunk has twice what its threads read at once, and of an example with more chunks than are few up to four times
// that, or more where there would be too many.
constexpr int64_t kFewChunks = 128, kMostChunks = 2048;

struct GroupPlan {
  int64_t positions, channels;
  int64_t chunk = 0;           // positions of a chunk, of which the last may be shorter
  int chunks = 0, slices = 0;  // of an example
  int width = 0;               // threads side by side, a power of two
  int64_t floats_a_group = 0;  // of the workspace

  int64_t tiles(int64_t examples) const { return examples * chunks * slices; }
};

// From the shapes alone, and never the number of examples. Two numbers are kept for each channel of a chunk, and two
// for a group. `floats_a_group`: what there is room for; fewer chunks do with less of it. No chunks: there is too
// little.
GroupPlan make_group_plan(int64_t positions, int64_t groups, int64_t group_size, int64_t floats_a_group = INT64_MAX);

// Between the passes, in the workspace: mean and rstd; and the means of groups, and each example's sums over a
// channel, which the gradients of weights are sums of.
cudaError_t merge_group_moments(const GroupNormForward& p, const GroupPlan& plan, cudaStream_t stream);
cudaError_t merge_group_sums(const GroupNormBackward& p, const GroupPlan& plan, cudaStream_t stream);

// The plan of a call, whose workspace may have another size than the plan wants.
template <typename Op>
GroupPlan group_plan_of(const Op& p) {
  const int64_t rows = p.examples * p.groups;
  return make_group_plan(p.positions, p.groups, p.group_size, rows > 0 ? p.workspace.floats / rows : 0);
}

// Where the workspace has the two numbers for each channel of each chunk of each example, and those for each group.
struct GroupParts {
  float2 *of_channels, *of_groups;

  template <typename Op>
  GroupParts(const Op& p, const GroupPlan& plan)
      : of_channels(reinterpret_cast<float2*>(p.workspace.data)),
        of_groups(of_channels + p.examples * plan.chunks * plan.channels) {}
};

// The activations, for results or cotangents of type Y: of z, and v times the slope at z. One of them as a type.
template <typename A>
struct OneActivation {
  template <typename Y>
  __device__ static float of(float z) {
    return A::template of<Y>(z);
  }
  template <typename Y>
  __device__ static float sloped(float v, float z) {
    return cuda::sloped<A, Y>(v, z);
  }
};

// Any of them, chosen for each element: for kernels that are not fast anyway, and take less time to compile so.
struct AnyActivation {
  Activation activation;

  template <typename F>
  __device__ float choose(F f) const {
    switch (activation) {
      case Activation::silu:
        return f(OneActivation<Silu>{});
      case Activation::relu:
        return f(OneActivation<Relu>{});
      case Activation::gelu:
        return f(OneActivation<Gelu>{});
      default:
        return f(OneActivation<Identity>{});
    }
  }
  template <typename Y>
  __device__ float of(float z) const {
    return choose([&](auto each) { return each.template of<Y>(z); });
  }
  template <typename Y>
  __device__ float sloped(float v, float z) const {
    return choose([&](auto each) { return each.template sloped<Y>(v, z); });
  }
};

// Calls f with the activation. EACH: as a type of its own, once for a loop, as a choice for each element keeps the
// compiler from computing several at once.
template <bool EACH, typename F>
__device__ void with_activation(Activation activation, F f) {
  if constexpr (!EACH) {
    f(AnyActivation{activation});
  } else if (activation == Activation::silu) {
    f(OneActivation<Silu>{});
  } else if (activation == Activation::relu) {
    f(OneActivation<Relu>{});
  } else if (activation == Activation::gelu) {
    f(OneActivation<Gelu>{});
  } else {
    f(OneActivation<Identity>{});
  }
}

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

// Those of up to COUNT values of each channel; of fewer, `there` says which. The squares are those about their own
// mean.
template <int COUNT, typename X, int N, typename F>
__device__ void moments_of(const Packed<X, N> (&packed)[COUNT], float count, F there, float2 (&now)[N]) {
  const auto for_each = [&](auto f) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      float values[N];
      unpack(packed[k], values);
#pragma unroll
      for (int i = 0; i < N; ++i) f(k, i, values[i]);
    }
  };
#pragma unroll
  for (int i = 0; i < N; ++i) now[i] = make_float2(0, 0);
  for_each([&](int, int i, float value) { now[i].x += value; });  // what is not there is zero
  const float share = reciprocal(count);
#pragma unroll
  for (int i = 0; i < N; ++i) now[i].x *= share;
  for_each([&](int k, int i, float value) {
    const float off = there(k) ? value - now[i].x : 0.0f;
    now[i].y = fmaf(off, off, now[i].y);
  });
}

// How a kernel reaches channels: in aligned vectors, each of channels of one group or of several, or in elements.
enum class GroupAccess : uint8_t { whole_groups, vectors, elements };

// How many blocks of a multiprocessor have enough registers.
template <typename X, GroupAccess ACCESS>
constexpr int kGroupBlocks = sizeof(X) < 4 && ACCESS == GroupAccess::whole_groups ? 4 : 3;

// A thread has a vector of channels of every `rows`-th position.
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
