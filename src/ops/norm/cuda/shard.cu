// Of a device's shard of rows the statistics, in one pass over memory, and y from the statistics of whole rows.
#include "engine/cuda/tile_loop.cuh"
#include "engine/cuda/weight.cuh"
#include "ops/norm/call.h"
#include "ops/norm/cuda/affine.cuh"
#include "ops/shared/cuda/stats.cuh"

namespace jaxnorm::cuda {
namespace {

// The warps of a row take a few vectors a thread of it at a time, which are in registers between their mean and the
// squares about it.
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
cudaError_t launch_statistics(const ShardStatistics& p, cudaStream_t stream) {
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
cudaError_t launch_statistics(const ShardStatistics& p, cudaStream_t stream) {
  return with_stats(p.kind, [&](auto stats) { return launch_statistics<decltype(stats), X>(p, stream); });
}

// y by tiles of rows, a thread with its columns' weights in registers.

// From column `col` on.
template <bool ALIGNED, int N>
__device__ void load_weight(const Input& weight, int64_t col, int remaining, float offset, float absent,
                            float (&to)[N]) {
  if (weight.data) load_floats<ALIGNED>(weight, col, remaining, to);
  complete(weight.data, offset, absent, to);
}

// Of x, whose statistics were taken from the last row on, the first rows are what the cache still has: tiles go from
// the first on.
template <typename X_, typename Y_, bool IS_ALIGNED>
class ApplyOp {
 public:
  using Params = ShardApply;
  using X = X_;
  using Y = Y_;
  static constexpr bool ALIGNED = IS_ALIGNED;
  static constexpr int N = kUnit<X, Y>;
  struct Row {
    float mean, rstd;
  };

  __device__ static const Input& from(const ShardApply& p) { return p.x; }
  __device__ static const Output& to(const ShardApply& p) { return p.y; }

  __device__ ApplyOp(const ShardApply& p, int64_t col, int remaining) {
    load_weight<ALIGNED>(p.scale, col, remaining, p.scale_offset, 1.0f, factor_);
    load_weight<ALIGNED>(p.bias, col, remaining, 0.0f, -0.0f, term_);
  }

  __device__ Row fetch(const ShardApply& p, int64_t row) const { return {p.mean ? p.mean[row] : 0.0f, p.rstd[row]}; }

  __device__ void apply(const ShardApply& p, const Row& row, float (&values)[N]) const {
#pragma unroll
    for (float& value : values) value = (value - row.mean) * row.rstd;
    if (!p.multiply_before_cast) unpack(pack<Y>(values), values);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = affine<true>(values[i], factor_[i], term_[i]);
  }

 private:
  float factor_[N], term_[N];
};

template <typename X, typename Y>
cudaError_t launch_apply(const ShardApply& p, cudaStream_t stream) {
  constexpr int N = kUnit<X, Y>;
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.x, p.y, p.scale, p.bias);
  return is_aligned ? launch_tiles<ApplyOp<X, Y, true>>(p, stream) : launch_tiles<ApplyOp<X, Y, false>>(p, stream);
}

template <typename T>
cudaError_t launch_beside(const ShardApply& p, cudaStream_t stream) {
  if (p.x.dtype == p.y.dtype) return launch_apply<T, T>(p, stream);
  return p.x.dtype == Dtype::f32 ? launch_apply<float, T>(p, stream) : launch_apply<T, float>(p, stream);
}

}  // namespace

Outcome run(const ShardStatistics& p, Stream stream) {
  if (p.rows == 0) return {cudaSuccess};
  return {with_dtype(p.x.dtype, [&](auto type) { return launch_statistics<decltype(type)>(p, stream); })};
}

Outcome run(const ShardApply& p, Stream stream) {
  if (p.rows == 0) return {cudaSuccess};
  const Dtype narrow = p.x.dtype == Dtype::f32 ? p.y.dtype : p.x.dtype;
  if (narrow == Dtype::f32) return {launch_apply<float, float>(p, stream)};
  return {narrow == Dtype::f16 ? launch_beside<__half>(p, stream) : launch_beside<__nv_bfloat16>(p, stream)};
}

}  // namespace jaxnorm::cuda
