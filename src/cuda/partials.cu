#include "cuda/launch.cuh"
#include "cuda/partials.h"

namespace jaxnorm::cuda {
namespace {

constexpr int kSumThreads = 512;

// Thread (x, y) adds partial rows y, y + blockDim.y, ... of a column, then thread (x, 0) adds those sums.
__global__ void __launch_bounds__(kSumThreads) sum_partials_kernel(Backward p, Partials partials) {
  const bool is_scale = blockIdx.y == 0 && partials.dscale;
  const float* from = is_scale ? partials.dscale : partials.dbias;
  const int64_t cols = p.heads.count * p.cols;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  __shared__ float sums[kSumThreads];

  float sum = 0;
  if (col < cols)
#pragma unroll 8
    for (int64_t row = threadIdx.y; row < partials.rows; row += blockDim.y) sum += from[row * cols + col];
  sums[threadIdx.y * blockDim.x + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= cols) return;
  for (unsigned y = 1; y < blockDim.y; ++y) sum += sums[y * blockDim.x + threadIdx.x];
  store_float(is_scale ? p.dscale : p.dbias, col, sum);
}

}  // namespace

cudaError_t sum_partials(const Backward& p, const Partials& partials, cudaStream_t stream) {
  // As many threads to a column as it has partial sums, within reason.
  const unsigned height = partials.rows > 8 ? 16 : partials.rows > 4 ? 8 : 4, width = kSumThreads / height;
  const int64_t cols = p.heads.count * p.cols;
  const dim3 grid(static_cast<unsigned>((cols + width - 1) / width), partials.dscale && partials.dbias ? 2 : 1);
  return launch_grid(sum_partials_kernel, grid, dim3(width, height), stream, p, partials);
}

}  // namespace jaxnorm::cuda
