// y of a device's shard of rows, from the statistics of whole rows. A thread has its columns' weights in registers and
// goes down the rows of its tile.
#include "cuda/engine/launch.cuh"
#include "cuda/engine/weight.cuh"
#include "cuda/ops.h"
#include "cuda/ops/affine.cuh"

namespace jaxnorm::cuda {
namespace {

constexpr int kApplyThreads = 256, kApplyRows = 4;  // rows: of a thread, on their way at once

// Columns of a thread.
template <typename X, typename Y>
constexpr int kUnit = min_of(kVector<X>, kVector<Y>);

// A block has a tile: columns as far as threadIdx.x goes, and `rows` rows. `count` tiles side by side cover a row.
struct Tiles {
  int count, rows;
};

// From column `col` on.
template <bool ALIGNED, int N>
__device__ void load_weight(const Input& weight, int64_t col, int remaining, float offset, float absent,
                            float (&to)[N]) {
  if (weight.data) load_floats<ALIGNED>(weight, col, remaining, to);
  complete(weight.data, offset, absent, to);
}

template <typename X, typename Y, bool ALIGNED>
__global__ void __launch_bounds__(kApplyThreads, 4)
    shard_apply_kernel(const __grid_constant__ ShardApply p, const __grid_constant__ Tiles tiles) {
  constexpr int N = kUnit<X, Y>;
  // The first rows first: of x, whose statistics were taken from the last row on, they are what the cache still has.
  const int block = blockIdx.x;
  const int64_t col = (int64_t{block % tiles.count} * blockDim.x + threadIdx.x) * N;
  if (col >= p.cols) return;
  const int remaining = ALIGNED ? N : static_cast<int>(min(int64_t{N}, p.cols - col));
  float factor[N], term[N];
  load_weight<ALIGNED>(p.scale, col, remaining, p.scale_offset, 1.0f, factor);
  load_weight<ALIGNED>(p.bias, col, remaining, 0.0f, -0.0f, term);

  const int64_t begin = int64_t{block / tiles.count} * tiles.rows;
  const int rows = static_cast<int>(min(int64_t{tiles.rows}, p.rows - begin)), step = blockDim.y;
  const X* const from = static_cast<const X*>(p.x.data) + begin * p.cols + col;
  Y* const to = static_cast<Y*>(p.y.data) + begin * p.cols + col;
#pragma unroll 1
  for (int row = threadIdx.y; row < rows; row += kApplyRows * step) {
    Packed<X, N> x[kApplyRows];
    float mean[kApplyRows], rstd[kApplyRows];
#pragma unroll
    for (int r = 0; r < kApplyRows; ++r) {
      const int at = min(row + r * step, rows - 1);
      x[r] = load<ALIGNED, N>(from + at * p.cols, remaining);
      mean[r] = p.mean ? p.mean[begin + at] : 0.0f;
      rstd[r] = p.rstd[begin + at];
    }
#pragma unroll
    for (int r = 0; r < kApplyRows; ++r) {
      const int at = row + r * step;
      if (at >= rows) break;
      float y[N];
      unpack(x[r], y);
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] = (y[i] - mean[r]) * rstd[r];
      if (!p.multiply_before_cast) unpack(pack<Y>(y), y);
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] = affine<true>(y[i], factor[i], term[i]);
      store<ALIGNED>(to + at * p.cols, pack<Y>(y), remaining);
    }
  }
}

template <typename X, typename Y>
cudaError_t launch(const ShardApply& p, cudaStream_t stream) {
  constexpr int N = kUnit<X, Y>;
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t vectors = ceil_div(p.cols, N), count = ceil_div(vectors, kApplyThreads);
  // Tiles begin on whole warps. Of rows that fit a block the next follows in memory as it does in the block.
  const int width = static_cast<int>(count == 1 ? vectors : ceil_div(ceil_div(vectors, count), kWarp) * kWarp);
  const int height = kApplyThreads / width;
  // Tiles so small that there are blocks for every multiprocessor, and so large that weights are read now and then.
  constexpr int64_t blocks_wanted = 4096, most = 8;
  const int64_t heights = std::clamp<int64_t>(p.rows / (kApplyRows * height) * count / blocks_wanted, 1, most);
  const Tiles tiles{static_cast<int>(count), static_cast<int>(heights) * kApplyRows * height};
  const int64_t blocks = ceil_div(p.rows, tiles.rows) * count;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;  // more than memory has rows for
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.x, p.y, p.scale, p.bias);
  return launch_grid(is_aligned ? shard_apply_kernel<X, Y, true> : shard_apply_kernel<X, Y, false>,
                     dim3(static_cast<unsigned>(blocks)), dim3(width, height), stream, p, tiles);
}

template <typename T>
cudaError_t launch_with(const ShardApply& p, cudaStream_t stream) {
  if (p.x.dtype == p.y.dtype) return launch<T, T>(p, stream);
  return p.x.dtype == Dtype::f32 ? launch<float, T>(p, stream) : launch<T, float>(p, stream);
}

}  // namespace

cudaError_t run(const ShardApply& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  const Dtype narrow = p.x.dtype == Dtype::f32 ? p.y.dtype : p.x.dtype;
  if (narrow == Dtype::f32) return launch<float, float>(p, stream);
  return narrow == Dtype::f16 ? launch_with<__half>(p, stream) : launch_with<__nv_bfloat16>(p, stream);
}

}  // namespace jaxnorm::cuda
