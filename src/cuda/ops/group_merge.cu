// Between the passes of GroupNorm: from the channels of chunks to groups, and to the gradients of weights.
#include <algorithm>

#include "cuda/ops/group_tile.cuh"
#include "cuda/ops/stats.cuh"

namespace jaxnorm::cuda {
namespace {

constexpr int kFewParts = 1024;  // that a warp merges; more of them a block does
constexpr int kWeightCols = 32;  // of a block

// The parts of a group of an example, which THREADS threads share, a warp or a block.
template <int THREADS>
struct GroupOfExample {
  int64_t group, example;  // the group's number among those of all examples
  int64_t first;           // its part of the first chunk
  int64_t parts;
  int thread;

  __device__ GroupOfExample(const GroupPlan& plan, int64_t groups, int64_t group_size)
      : group((int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / THREADS),
        example(group / groups),
        first(example * plan.chunks * plan.channels + group % groups * group_size),
        parts(plan.chunks * group_size),
        thread(threadIdx.x % THREADS) {}
};

// The sum, or what `merge` makes of them, of the values of all THREADS threads, in the first.
template <int THREADS, typename T, typename F>
__device__ T merge_threads(T own, F merge) {
  __shared__ T shared[kGroupThreads];
  shared[threadIdx.x] = own;
#pragma unroll
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if constexpr (THREADS == kWarp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
    if (threadIdx.x % THREADS < half) shared[threadIdx.x] = own = merge(own, shared[threadIdx.x + half]);
  }
  return own;
}

template <int THREADS>
__global__ void __launch_bounds__(kGroupThreads)
    merge_moments_kernel(GroupPlan plan, GroupNormForward p, const float2* parts, float* mean, float* rstd,
                         int64_t stride) {
  const GroupOfExample<THREADS> g(plan, p.groups, p.group_size);
  const bool is_there = g.example < p.examples;
  Moments own{};
  for (int64_t i = g.thread; is_there && i < g.parts; i += THREADS) {
    const int64_t chunk = i / p.group_size;
    const float2 part = parts[g.first + chunk * plan.channels + i % p.group_size];
    const int64_t count = min(plan.chunk, plan.positions - chunk * plan.chunk);
    own = MeanVariance::joined(own, {{static_cast<float>(count), part.x, part.y, 0}});
  }
  own = merge_threads<THREADS>(own, [](const Moments& a, const Moments& b) { return MeanVariance::joined(a, b); });
  if (g.thread > 0 || !is_there) return;
  mean[g.group * stride] = own.value[1];
  rstd[g.group * stride] = reciprocal_sqrt(fmaf(own.value[2], reciprocal(own.value[0]), p.epsilon));
}

template <int THREADS>
__device__ void merge_sums(const GroupPlan& plan, const GroupNormBackward& p, const float2* parts, float2* means) {
  const GroupOfExample<THREADS> g(plan, p.groups, p.group_size);
  const bool is_there = g.example < p.examples;
  float2 own{};
  const int64_t scale_row = is_there ? p.scale.map.row(g.example) : 0;
  for (int64_t i = g.thread; is_there && i < g.parts; i += THREADS) {
    const int64_t chunk = i / p.group_size, of_group = i % p.group_size;
    const float2 part = parts[g.first + chunk * plan.channels + of_group];
    const int64_t channel = g.group % p.groups * p.group_size + of_group;
    const float factor = p.scale.data ? weight_at(p.scale, scale_row, plan.channels, channel) + p.scale_offset : 1.0f;
    own.x = fmaf(part.x, factor, own.x);
    own.y = fmaf(part.y, factor, own.y);
  }
  own = merge_threads<THREADS>(own, [](float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); });
  if (g.thread > 0 || !is_there) return;
  const float share = reciprocal(static_cast<float>(p.positions * p.group_size));
  means[g.group] = make_float2(own.x * share, own.y * share);
}

// The sums over all chunks of the examples that have this row of the weight. SECOND: which of a part's two numbers.
template <bool SECOND>
__device__ void sum_weight(const GroupPlan& plan, const GroupWeight& weight, const Output& to, int64_t examples,
                           const float2* parts, int64_t block) {
  const int64_t blocks_a_row = (plan.channels + kWeightCols - 1) / kWeightCols, row = block / blocks_a_row;
  const int col = threadIdx.x % kWeightCols, first = threadIdx.x / kWeightCols, step = kGroupThreads / kWeightCols;
  const int64_t channel = block % blocks_a_row * kWeightCols + col;
  float2 own{};
  if (channel < plan.channels)
    for (int64_t example = 0; example < examples; ++example) {
      if (weight.map.row(example) != row) continue;
      const float2* from = parts + example * plan.chunks * plan.channels + channel;
#pragma unroll 8
      for (int chunk = first; chunk < plan.chunks; chunk += step) {
        const float2 part = from[chunk * plan.channels];
        own.x += SECOND ? part.y : part.x;
      }
    }
  __shared__ float sums[kGroupThreads];
  sums[threadIdx.x] = own.x;
  __syncthreads();
  if (first > 0 || channel >= plan.channels) return;
  for (int i = 1; i < step; ++i) own.x += sums[i * kWeightCols + col];
  store_float(to, row * plan.channels + channel, own.x);
}

// Blocks below `of_scale` have groups, those below `of_bias` columns of dscale, and others columns of dbias.
template <int THREADS>
__global__ void __launch_bounds__(kGroupThreads)
    merge_sums_kernel(GroupPlan plan, GroupNormBackward p, const float2* parts, float2* means, int64_t of_scale,
                      int64_t of_bias) {
  if (blockIdx.x < of_scale) {
    merge_sums<THREADS>(plan, p, parts, means);
  } else if (blockIdx.x < of_bias) {
    sum_weight<true>(plan, p.scale, p.dscale, p.examples, parts, blockIdx.x - of_scale);
  } else {
    sum_weight<false>(plan, p.bias, p.dbias, p.examples, parts, blockIdx.x - of_bias);
  }
}

// How many rows of channels a weight has.
int64_t rows_of(const GroupWeight& weight) {
  int64_t rows = 1;
  for (int axis = 0; axis < weight.map.axes; ++axis)
    if (weight.map.stride[axis]) rows *= weight.map.extent[axis];
  return rows;
}

int64_t blocks_for(const Output& gradient, const GroupWeight& weight, int64_t channels) {
  return gradient ? rows_of(weight) * ((channels + kWeightCols - 1) / kWeightCols) : 0;
}

bool are_few(const GroupPlan& plan, int64_t group_size) { return plan.chunks * group_size <= kFewParts; }

int64_t blocks_of_groups(int64_t groups, bool few) {
  constexpr int warps = kGroupThreads / kWarp;
  return few ? (groups + warps - 1) / warps : groups;
}

template <typename Kernel, typename... Args>
cudaError_t launch_blocks(Kernel kernel, int64_t blocks, cudaStream_t stream, const Args&... args) {
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  if (blocks == 0) return cudaSuccess;
  return launch_grid(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kGroupThreads), stream, args...);
}

}  // namespace

cudaError_t merge_group_moments(const GroupNormForward& p, const GroupPlan& plan, cudaStream_t stream) {
  const GroupStatistics stats(p, plan);
  const bool few = are_few(plan, p.group_size);
  return launch_blocks(few ? merge_moments_kernel<kWarp> : merge_moments_kernel<kGroupThreads>,
                       blocks_of_groups(p.examples * p.groups, few), stream, plan, p, GroupParts(p, plan).of_channels,
                       stats.mean, stats.rstd, stats.stride);
}

cudaError_t merge_group_sums(const GroupNormBackward& p, const GroupPlan& plan, cudaStream_t stream) {
  const GroupParts kept(p, plan);
  const bool few = are_few(plan, p.group_size);
  const int64_t of_scale = p.dx ? blocks_of_groups(p.examples * p.groups, few) : 0;
  const int64_t of_bias = of_scale + blocks_for(p.dscale, p.scale, plan.channels);
  const int64_t end = of_bias + blocks_for(p.dbias, p.bias, plan.channels);
  return launch_blocks(few ? merge_sums_kernel<kWarp> : merge_sums_kernel<kGroupThreads>, end, stream, plan, p,
                       kept.of_channels, kept.of_groups, of_scale, of_bias);
}

}  // namespace jaxnorm::cuda
