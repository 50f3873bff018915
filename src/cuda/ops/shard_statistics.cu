// The statistics of rows that are split over devices, of the part that is here: one pass over memory. A row's warps
// take turns of it, each a few vectors a thread, which are in registers between their mean and the squares about it.
#include "cuda/engine/launch.cuh"
#include "cuda/norms.h"
#include "cuda/ops/forward_row.cuh"

namespace jaxnorm::cuda {
namespace {

constexpr int kStatisticsThreads = 256, kTurnVectors = 4;  // vectors: of a thread, on their way at once

__device__ Sums<1> joined(const Sums<1>& a, const Sums<1>& b) { return {{a.value[0] + b.value[0]}}; }

// Chan, Golub and LeVeque 1983. Either may have no columns.
__device__ Moments joined(const Moments& a, const Moments& b) {
  if (!(b.value[0] > 0)) return a;
  if (!(a.value[0] > 0)) return b;
  const float count = a.value[0] + b.value[0], share = b.value[0] * reciprocal(count);
  const float distance = b.value[1] - a.value[1];
  const float squares = fmaf(a.value[0] * share * distance, distance, b.value[2]);
  return {{count, fmaf(distance, share, a.value[1]), a.value[2] + squares, 0}};
}

template <Kind KIND, typename X, bool ALIGNED>
__global__ void __launch_bounds__(kStatisticsThreads, 4)
    part_statistics_kernel(const __grid_constant__ ShardStatistics p, int threads_per_row, float reciprocal_cols) {
  using Tile = Tiling<X, Regime<kWholeWarps, kTurnVectors, 1>, ALIGNED ? Access::vectors : Access::elementwise>;
  ThreadGroup<kWholeWarps, Part<KIND>, 1> group(threads_per_row, p.cols, 0, reciprocal_cols);
  const int64_t row = group.index * (blockDim.x / threads_per_row) + group.place;
  if (row >= p.rows) return;

  const X* from = static_cast<const X*>(p.x.data) + row * p.cols;
  const int64_t turn = int64_t{group.threads} * Tile::VECTORS * Tile::N;
  Part<KIND> sum{};
#pragma unroll 1
  for (int64_t left = p.cols; left > 0; left -= turn, from += turn) {
    group.end = min(left, turn);
    Row<X, Tile> x;
    x.read(group, from);
    sum = joined(sum, warp_part<KIND, Tile>(x, group, warp_cols<Tile>(group)));
  }
  group.publish(sum);
  const Part<KIND> whole = group.collect();
  if (group.rank > 0) return;
  constexpr bool kLayer = KIND == Kind::layer;
  p.variance[row] = whole.value[kLayer ? 2 : 0] * group.reciprocal();
  if constexpr (kLayer) p.mean[row] = whole.value[1];
}

template <Kind KIND, typename X>
cudaError_t launch(const ShardStatistics& p, cudaStream_t stream) {
  constexpr int N = kVector<X>, most = kStatisticsThreads / kWarp;
  constexpr int64_t share = kWarp * kTurnVectors * N;  // columns of a warp in a turn
  const int warps = static_cast<int>(std::min<int64_t>(most, (p.cols + share - 1) / share)), rows = most / warps;
  const int64_t blocks = (p.rows + rows - 1) / rows;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;  // more than memory has rows for
  const bool aligned = p.cols % N == 0 && aligned_for<N>(kDtype<X>, p.x.data);
  return launch_grid(aligned ? part_statistics_kernel<KIND, X, true> : part_statistics_kernel<KIND, X, false>,
                     dim3(static_cast<unsigned>(blocks)), dim3(rows * warps * kWarp), stream, p, warps * kWarp,
                     1.0f / static_cast<float>(p.cols));
}

template <typename X>
cudaError_t launch(const ShardStatistics& p, cudaStream_t stream) {
  return p.kind == Kind::rms ? launch<Kind::rms, X>(p, stream) : launch<Kind::layer, X>(p, stream);
}

}  // namespace

cudaError_t shard_statistics(const ShardStatistics& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.x.dtype == Dtype::f32) return launch<float>(p, stream);
  return p.x.dtype == Dtype::f16 ? launch<__half>(p, stream) : launch<__nv_bfloat16>(p, stream);
}

}  // namespace jaxnorm::cuda
