// Between the passes of GroupNorm: from the channels of chunks to groups, and to the gradients of weights.
#include <algorithm>

#include "ops/group_norm/cuda/group_tile.cuh"

namespace jaxnorm::cuda {
namespace {

constexpr int kFewParts = 128;  // that a warp merges; more of them a block does

// A group of an example, which THREADS threads share, a warp or a block. A thread has one of its channels, and every
// `rows`-th chunk.
template <int THREADS>
struct GroupOfExample {
  int64_t group;  // its number among those of all examples
  int example, channel, size, width, rows, thread;
  bool is_there;

  __device__ GroupOfExample(const Groups& p)
      : group((int64_t{blockIdx.x} * kGroupThreads + threadIdx.x) / THREADS),
        size(static_cast<int>(p.group_size)),
        width(min(THREADS, size)),
        rows(THREADS / width),
        thread(threadIdx.x % THREADS),
        is_there(group < p.examples * p.groups) {
    example = static_cast<int>(group / p.groups);
    channel = static_cast<int>(group % p.groups) * size;
  }

  // Calls f(chunk, part) for each chunk that this thread has of the channel.
  template <typename F>
  __device__ void for_each_part(const GroupPlan& plan, const float2* parts, int of_group, F f) const {
    if (!is_there || of_group >= size || thread >= rows * width) return;
    const float2* const from = parts + int64_t{example} * plan.chunks * plan.channels + channel + of_group;
#pragma unroll 4
    for (int chunk = thread / width; chunk < plan.chunks; chunk += rows) f(chunk, from[chunk * plan.channels]);
  }
};

// What merge(a, b) makes of the values of `count` threads that are `step` apart, from this one on, in a fixed order.
template <int THREADS, typename T, typename F>
__device__ T merge_threads(T own, int step, int count, F merge) {
  __shared__ T shared[kGroupThreads];
  const auto wait = [] {
    if constexpr (THREADS == kWarp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };
  wait();  // until what was there before is read
  shared[threadIdx.x] = own;
  int power = 1;
  while (power < count) power *= 2;
  const int thread = threadIdx.x % THREADS;
  for (int half = power / 2; half > 0; half /= 2) {
    wait();
    if (thread < half * step && thread + half * step < count * step)
      shared[threadIdx.x] = own = merge(own, shared[threadIdx.x + half * step]);
  }
  return own;
}

struct CountedMoments {
  float count;
  float2 moments;
};

template <int THREADS>
__global__ void __launch_bounds__(kGroupThreads)
    merge_moments_kernel(GroupPlan plan, GroupNormForward p, const float2* parts, float* mean, float* rstd,
                         int64_t stride) {
  const GroupOfExample<THREADS> g(p);
  const auto join = [](const CountedMoments& a, const CountedMoments& b) {
    return CountedMoments{a.count + b.count, JoinMoments(a.count, b.count)(a.moments, b.moments)};
  };
  CountedMoments own{};
  for (int of_group = g.thread % g.width; of_group < g.size; of_group += g.width)
    g.for_each_part(plan, parts, of_group, [&](int chunk, const float2& part) {
      const float count = static_cast<float>(min(plan.chunk, plan.positions - chunk * plan.chunk));
      own = join(own, {count, part});
    });
  own = merge_threads<THREADS>(own, 1, THREADS, join);
  if (g.thread > 0 || !g.is_there) return;
  mean[g.group * stride] = own.moments.x;
  rstd[g.group * stride] = reciprocal_sqrt(fmaf(own.moments.y, reciprocal(own.count), p.epsilon));
}

__device__ float2 sum_of(const float2& a, const float2& b) { return make_float2(a.x + b.x, a.y + b.y); }

// The means of groups, and in place of the parts of an example's first chunk the sums over all of its chunks.
template <int THREADS>
__global__ void __launch_bounds__(kGroupThreads)
    merge_sums_kernel(GroupPlan plan, GroupNormBackward p, float2* parts, float2* means) {
  const GroupOfExample<THREADS> g(p);
  const int64_t scale_row = g.is_there ? p.scale.map.row(g.example) : 0;
  float2 of_all{};
  for (int first = 0; first < g.size; first += g.width) {
    const int of_group = first + g.thread % g.width;
    float2 own{};
    g.for_each_part(plan, parts, of_group, [&](int, const float2& part) { own = sum_of(own, part); });
    own = merge_threads<THREADS>(own, g.width, g.rows, sum_of);
    if (g.thread >= g.width || of_group >= g.size || !g.is_there) continue;
    const int channel = g.channel + of_group;
    parts[int64_t{g.example} * plan.chunks * plan.channels + channel] = own;
    float factor[1] = {1.0f};
    if (p.scale.data) {
      load_floats<false>(p.scale, scale_row * plan.channels + channel, 1, factor);
      factor[0] += p.scale_offset;
    }
    of_all = make_float2(fmaf(own.x, factor[0], of_all.x), fmaf(own.y, factor[0], of_all.y));
  }
  of_all = merge_threads<THREADS>(of_all, 1, g.width, sum_of);
  if (g.thread > 0 || !g.is_there) return;
  const float share = reciprocal(static_cast<float>(p.positions * p.group_size));
  means[g.group] = make_float2(of_all.x * share, of_all.y * share);
}

template <typename Kernel, typename... Args>
cudaError_t launch_merge(Kernel by_warp, Kernel by_block, const Groups& p, const GroupPlan& plan, cudaStream_t stream,
                         const Args&... args) {
  const int64_t groups = p.examples * p.groups;
  const bool few = plan.chunks * p.group_size <= kFewParts;
  const int64_t blocks = few ? (groups * kWarp + kGroupThreads - 1) / kGroupThreads : groups;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  return launch_grid(few ? by_warp : by_block, dim3(static_cast<unsigned>(blocks)), dim3(kGroupThreads), stream, plan,
                     args...);
}

}  // namespace

cudaError_t merge_group_moments(const GroupNormForward& p, const GroupPlan& plan, cudaStream_t stream) {
  const GroupStatistics stats(p, plan);
  const float2* const parts = GroupParts(p, plan).of_channels;
  return launch_merge(merge_moments_kernel<kWarp>, merge_moments_kernel<kGroupThreads>, p, plan, stream, p, parts,
                      stats.mean, stats.rstd, stats.stride);
}

cudaError_t merge_group_sums(const GroupNormBackward& p, const GroupPlan& plan, cudaStream_t stream) {
  const GroupParts kept(p, plan);
  return launch_merge(merge_sums_kernel<kWarp>, merge_sums_kernel<kGroupThreads>, p, plan, stream, p, kept.of_channels,
                      kept.of_groups);
}

}  // namespace jaxnorm::cuda
