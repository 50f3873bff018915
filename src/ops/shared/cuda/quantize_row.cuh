// Quantising what shares a scale by a block, which keeps it in registers, if it has room for it, between the largest
// magnitude and the values.
#pragma once

#include <algorithm>

#include "engine/cuda/launch.cuh"
#include "ops/shared/cuda/quantize.cuh"

namespace jaxnorm::cuda {

constexpr int kMostRowWarps = 16;

template <int N>
__device__ void store_values(const Output& to, int64_t at, float (&v)[N], float reciprocal, int count) {
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] *= reciprocal;
  with_quantized(to.dtype, [&](auto dtype) {
    store<true>(static_cast<uint8_t*>(to.data) + at, pack_quantized<decltype(dtype)::value>(v), count);
  });
}

// By all threads of a block: the group of this number. HELD: how many vectors each thread keeps; 0: it computes them
// again. WARPS: the most of a block. A block's next group has the other one of two turns. compute(column, count, y)
// gives a vector, whose elements are there or, with a count of 0, none.
template <int N, int HELD, int WARPS, typename F>
__device__ void quantize_group(const Quantization& q, int64_t number, int turn, F compute) {
  __shared__ float of_warps[2][WARPS];
  float (&largest)[WARPS] = of_warps[turn];
  const int64_t at = number * q.group;
  const auto there = [&](int64_t column) { return column < q.group ? N : 0; };
  float kept[HELD > 0 ? HELD : 1][N], amax = 0.0f;
  const int64_t first = int64_t{threadIdx.x} * N, step = int64_t{blockDim.x} * N;
  if constexpr (HELD > 0) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      compute(first + i * step, there(first + i * step), kept[i]);
      amax = largest_in(amax, kept[i]);
    }
  } else if (!q.given) {
    for (int64_t column = first; column < q.group; column += step) {
      compute(column, N, kept[0]);
      amax = largest_in(amax, kept[0]);
    }
  }
  amax = warp_largest(amax);
  if (lane() == 0) largest[threadIdx.x / kWarp] = amax;
  __syncthreads();
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) amax = larger_magnitude(amax, largest[warp]);
  const float scale = q.given ? __ldg(q.given) : scale_of(q, amax), reciprocal = 1.0f / scale;
  if (!q.given && threadIdx.x == 0) q.scales[number] = amax == 0.0f ? q.of_zeros : scale;
  if constexpr (HELD > 0) {
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      store_values(q.values, at + first + i * step, kept[i], reciprocal, there(first + i * step));
  } else {
    for (int64_t column = first; column < q.group; column += step) {
      compute(column, N, kept[0]);
      store_values(q.values, at + column, kept[0], reciprocal, N);
    }
  }
}

// Whether a block of at most so many warps keeps a group of so many columns.
template <int N, int HELD, int WARPS>
bool is_held(int64_t columns) {
  return columns <= int64_t{WARPS} * kWarp * HELD * N;
}

// Of a block for such a group: as few as have room for it with the vectors that each thread holds.
template <int N, int HELD, int WARPS>
int row_warps(int64_t columns) {
  const int64_t vectors = (columns + N - 1) / N, held = HELD > 0 ? HELD : 1;
  return static_cast<int>(std::min<int64_t>(WARPS, (vectors + held * kWarp - 1) / (held * kWarp)));
}

// A block for each group, of as few warps as have room for it with the vectors that each thread holds.
template <int N, int HELD, typename Op>
cudaError_t launch_groups_of(void (*kernel)(Op), const Op& p, int64_t columns, int64_t blocks, cudaStream_t stream) {
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  if (blocks == 0) return cudaSuccess;
  const int threads = row_warps<N, HELD, kMostRowWarps>(columns) * kWarp;
  return launch_grid(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), stream, p);
}

}  // namespace jaxnorm::cuda
