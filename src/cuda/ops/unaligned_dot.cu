// The product of matrices of 8-bit floats where an array does not begin at 16 bytes, as cuBLASLt wants it: XLA may hand
// a call a part of another array. It is slow, and adds up in f32.
#include <cuda_fp8.h>

#include <climits>

#include "cuda/engine/launch.cuh"
#include "cuda/ops.h"

namespace jaxnorm::cuda {
namespace {

constexpr int kTile = 16;  // rows and columns of a block, and how many products it reads at once

__device__ float value_at(const Input& matrix, int64_t i) {
  const __nv_fp8_storage_t bits = static_cast<const __nv_fp8_storage_t*>(matrix.data)[i];
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, matrix.dtype == Dtype::f8e5m2 ? __NV_E5M2 : __NV_E4M3)));
}

template <typename Y>
__global__ void __launch_bounds__(kTile* kTile) dot_kernel(QuantizedDot p) {
  __shared__ float x[kTile][kTile + 1], weights[kTile][kTile + 1];
  const int row_of_tile = threadIdx.x / kTile, col_of_tile = threadIdx.x % kTile;
  const int64_t row = int64_t{blockIdx.x} * kTile + row_of_tile, first_col = int64_t{blockIdx.y} * kTile;
  const int64_t col = first_col + col_of_tile;
  float sum = 0;
  for (int64_t first = 0; first < p.depth; first += kTile) {
    // Its columns are whole tiles, and so is what is summed.
    x[row_of_tile][col_of_tile] = row < p.rows ? value_at(p.x, row * p.depth + first + col_of_tile) : 0;
    weights[row_of_tile][col_of_tile] = value_at(p.weights, (first_col + row_of_tile) * p.depth + first + col_of_tile);
    __syncthreads();
    for (int k = 0; k < kTile; ++k) sum = fmaf(x[row_of_tile][k], weights[col_of_tile][k], sum);
    __syncthreads();
  }
  if (row >= p.rows) return;
  float y = sum * p.x_scales[row] * p.weight_scales[col];
  if (p.bias.data) y += static_cast<float>(static_cast<const Y*>(p.bias.data)[col]);
  static_cast<Y*>(p.y.data)[row * p.cols + col] = static_cast<Y>(y);
}

template <typename Y>
cudaError_t dot_to(const QuantizedDot& p, cudaStream_t stream) {
  const int64_t blocks = (p.rows + kTile - 1) / kTile, blocks_across = p.cols / kTile;
  if (blocks > INT_MAX || blocks_across > 65535) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(blocks_across));
  return launch_grid(dot_kernel<Y>, grid, kTile * kTile, stream, p);
}

}  // namespace

cudaError_t unaligned_dot(const QuantizedDot& p, cudaStream_t stream) {
  static_assert(kDotMultiple % kTile == 0);
  if (p.y.dtype == Dtype::f32) return dot_to<float>(p, stream);
  return p.y.dtype == Dtype::f16 ? dot_to<__half>(p, stream) : dot_to<__nv_bfloat16>(p, stream);
}

}  // namespace jaxnorm::cuda
