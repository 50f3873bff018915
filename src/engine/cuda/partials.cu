#include <algorithm>
#include <utility>

#include "engine/cuda/launch.cuh"
#include "engine/cuda/partials.h"

namespace jaxnorm::cuda {
namespace {

constexpr int kSumThreads = 512;
constexpr int kAtOnce = 9;  // partial sums that a thread has on their way

// Thread (x, y) adds partial rows y, y + blockDim.y, ... of a column, then thread (x, 0) adds those sums.
__global__ void __launch_bounds__(kSumThreads) sum_partials_kernel(PartialSum first, PartialSum second) {
  const PartialSum own = blockIdx.y == 0 ? first : second;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int rows = static_cast<int>(own.rows), height = static_cast<int>(blockDim.y);
  __shared__ float sums[kSumThreads];

  float sum = 0;
  if (col < own.cols) {
    const float* from = own.from + threadIdx.y * own.stride + col;
    for (int row = threadIdx.y; row < rows; row += kAtOnce * height) {
      float part[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, from += height * own.stride) part[i] = row + i * height < rows ? *from : 0.0f;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sum += part[i];
    }
  }
  sums[threadIdx.y * blockDim.x + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= own.cols) return;
  for (int y = 1; y < height; ++y) sum += sums[y * blockDim.x + threadIdx.x];
  store_float(own.to, col, sum);
}

}  // namespace

cudaError_t sum_partials(PartialSum first, PartialSum second, cudaStream_t stream) {
  if (!first.to) std::swap(first, second);
  if (!first.to) return cudaSuccess;
  const PartialSum& other = second.to ? second : first;
  const int64_t rows = std::max(first.rows, other.rows), cols = std::max(first.cols, other.cols);
  // As many threads to a column as have all of its partial sums on their way at once, within reason.
  unsigned height = 1;
  while (height < 32 && height * kAtOnce < rows) height *= 2;
  const unsigned width = kSumThreads / height;
  const dim3 grid(static_cast<unsigned>((cols + width - 1) / width), second.to ? 2 : 1);
  return launch_grid(sum_partials_kernel, grid, dim3(width, height), stream, first, second);
}

cudaError_t sum_partials(const Partials& partials, int64_t cols, Output dscale, Output dbias, cudaStream_t stream) {
  return sum_partials({partials.dscale, partials.rows, cols, cols, dscale},
                      {partials.dbias, partials.rows, cols, cols, dbias}, stream);
}

}  // namespace jaxnorm::cuda
