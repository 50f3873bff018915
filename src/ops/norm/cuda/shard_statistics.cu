// The statistics of a device's shard of rows: one pass over memory. The warps of a row take a few vectors a thread of
// it at a time, which are in registers between their mean and the squares about it.
#include "engine/cuda/launch.cuh"
#include "ops/norm/cuda.h"
#include "ops/shared/cuda/stats.cuh"

namespace jaxnorm::cuda {
namespace {

constexpr int kStatisticsThreads = 256, kVectorsAtOnce = 4;  // vectors: of a thread

template <typename STATS, typename X, bool ALIGNED>
__global__ void __launch_bounds__(kStatisticsThreads, 4)
    shard_statistics_kernel(const __grid_constant__ ShardStatistics p, int threads_per_row, float reciprocal_cols) {
  using Tile = Tiling<X, Regime<kWholeWarps, kVectorsAtOnce, 1>, ALIGNED ? Access::vectors : Access::elementwise>;
  ThreadGroup<kWholeWarps, typename STATS::Part, 1> group(threads_per_row, p.cols, 0, reciprocal_cols);
  const int64_t row = group.index * (blockDim.x / threads_per_row) + group.place;
  if (row >= p.rows) return;

  const X* from = static_cast<const X*>(p.x.data) + row * p.cols;
  const int64_t step = int64_t{group.threads} * Tile::VECTORS * Tile::N;
  typename STATS::Part sum{};
#pragma unroll 1
  for (int64_t remaining = p.cols; remaining > 0; remaining -= step, from += step) {
    group.end = min(remaining, step);
    Row<X, Tile> x;
    x.read(group, from);
    sum = STATS::joined(sum, STATS::template warp_part<Tile>(x, group, warp_cols<Tile>(group)));
  }
  group.publish(sum);
  const typename STATS::Part shard = group.collect();
  if (group.rank == 0) STATS::write_shard(p, shard, group.reciprocal(), row);
}

template <typename STATS, typename X>
cudaError_t launch(const ShardStatistics& p, cudaStream_t stream) {
  constexpr int N = kVector<X>, most = kStatisticsThreads / kWarp;
  constexpr int64_t share = kWarp * kVectorsAtOnce * N;  // columns of a warp at a time
  const int warps = static_cast<int>(std::min<int64_t>(most, (p.cols + share - 1) / share)), rows = most / warps;
  const int64_t blocks = (p.rows + rows - 1) / rows;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;  // more than memory has rows for
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.x);
  return launch_grid(is_aligned ? shard_statistics_kernel<STATS, X, true> : shard_statistics_kernel<STATS, X, false>,
                     dim3(static_cast<unsigned>(blocks)), dim3(rows * warps * kWarp), stream, p, warps * kWarp,
                     1.0f / static_cast<float>(p.cols));
}

template <typename X>
cudaError_t launch(const ShardStatistics& p, cudaStream_t stream) {
  return with_stats(p.kind, [&](auto stats) { return launch<decltype(stats), X>(p, stream); });
}

}  // namespace

cudaError_t run(const ShardStatistics& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.x.dtype == Dtype::f32) return launch<float>(p, stream);
  return p.x.dtype == Dtype::f16 ? launch<__half>(p, stream) : launch<__nv_bfloat16>(p, stream);
}

}  // namespace jaxnorm::cuda
