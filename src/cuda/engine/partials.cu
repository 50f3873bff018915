#include "cuda/engine/launch.cuh"
#include "cuda/engine/partials.h"

namespace jaxnorm::cuda {
namespace {

constexpr int kSumThreads = 512;
constexpr int kAtOnce = 9;  // partial sums that a thread has on their way

// Thread (x, y) adds partial rows y, y + blockDim.y, ... of a column, then thread (x, 0) adds those sums.
__global__ void __launch_bounds__(kSumThreads)
    sum_partials_kernel(Partials partials, int64_t cols, Output dscale, Output dbias) {
  const bool is_scale = blockIdx.y == 0 && dscale.data;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int rows = static_cast<int>(partials.rows), height = static_cast<int>(blockDim.y);
  __shared__ float sums[kSumThreads];

  float sum = 0;
  if (col < cols) {
    const float* from = (is_scale ? partials.dscale : partials.dbias) + threadIdx.y * cols + col;
    for (int row = threadIdx.y; row < rows; row += kAtOnce * height) {
      float part[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, from += height * cols) part[i] = row + i * height < rows ? *from : 0.0f;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sum += part[i];
    }
  }
  sums[threadIdx.y * blockDim.x + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= cols) return;
  for (int y = 1; y < height; ++y) sum += sums[y * blockDim.x + threadIdx.x];
  store_float(is_scale ? dscale : dbias, col, sum);
}

}  // namespace

cudaError_t sum_partials(const Partials& partials, int64_t cols, Output dscale, Output dbias, cudaStream_t stream) {
  // As many threads to a column as have all of its partial sums on their way at once, within reason.
  unsigned height = 1;
  while (height < 32 && height * kAtOnce < partials.rows) height *= 2;
  const unsigned width = kSumThreads / height;
  const dim3 grid(static_cast<unsigned>((cols + width - 1) / width), dscale && dbias ? 2 : 1);
  return launch_grid(sum_partials_kernel, grid, dim3(width, height), stream, partials, cols, dscale, dbias);
}

}  // namespace jaxnorm::cuda
