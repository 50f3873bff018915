// What rounding by rows and by columns to float8 shares: the largest magnitudes of columns, each of which blocks find
// in some rows, as an atomic maximum does not depend on the order in which they come; and columns rounded by these, in
// tiles that are transposed on their way through shared memory.
#pragma once

#include "engine/cuda/launch.cuh"
#include "ops/float8_linear/call.h"
#include "ops/shared/cuda/quantize.cuh"

namespace jaxnorm::cuda {

inline Quantization to_float8(const Rounding& p, const Output& values, float* scales) {
  Quantization q;
  q.values = {values.data, Dtype::f8e4m3fn};
  q.scales = scales, q.group = p.cols, q.power_of_two = p.power_of_two;
  q.max_scale = INFINITY, q.of_zeros = 0.0f;
  return q;
}

struct Magnitudes {
  float* largest = nullptr;        // of each column, zeros at first; may be absent
  const float* of_rows = nullptr;  // factors; may be absent

  __device__ float factor(int64_t row) const { return of_rows ? __ldg(of_rows + row) : 1.0f; }

  // Most of what a block finds was exceeded before. A NaN is larger than all else.
  __device__ void give(int64_t column, float magnitude) const {
    const uint32_t bits = __float_as_uint(magnitude);
    uint32_t* const all = reinterpret_cast<uint32_t*>(largest) + column;
    if (bits > *static_cast<volatile uint32_t*>(all)) atomicMax(all, bits);
  }
};

struct ColumnsOf {
  const void* x;
  int64_t rows, cols;
  Magnitudes columns;
};

constexpr int kMagnitudeThreads = 128;

// A block has some columns of every gridDim.y-th row.
template <typename X, int N>
__global__ void __launch_bounds__(kMagnitudeThreads) largest_of_columns_kernel(const __grid_constant__ ColumnsOf p) {
  const int64_t column = (int64_t{blockIdx.x} * kMagnitudeThreads + threadIdx.x) * N;
  if (column >= p.cols) return;
  float largest[N] = {};
#pragma unroll 4
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    float v[N];
    unpack(load<true, N>(static_cast<const X*>(p.x) + row * p.cols + column, N), v);
    const float factor = p.columns.factor(row);
#pragma unroll
    for (int i = 0; i < N; ++i) largest[i] = larger_magnitude(largest[i], v[i] * factor);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) p.columns.give(column + i, largest[i]);
}

template <typename X, int N>
cudaError_t launch_largest_of_columns(const ColumnsOf& p, cudaStream_t stream) {
  constexpr int kBlocksAtOnce = 16, kMostY = 65535;
  const int64_t across = (p.cols + kMagnitudeThreads * N - 1) / (kMagnitudeThreads * N);
  const int64_t down = std::max<int64_t>(1, current_device().multiprocessors * kBlocksAtOnce / across);
  if (across > INT_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(std::min({p.rows, down, int64_t{kMostY}})));
  return launch_grid(largest_of_columns_kernel<X, N>, grid, dim3(kMagnitudeThreads), stream, p);
}

template <typename X>
cudaError_t largest_of_columns(const ColumnsOf& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const bool is_aligned = p.cols % N == 0 && aligned_for<N>(kDtype<X>, p.x);
  return is_aligned ? launch_largest_of_columns<X, N>(p, stream) : launch_largest_of_columns<X, 1>(p, stream);
}

struct TileRounding {
  ColumnsOf of;
  Quantization quantized;
  uint8_t *values, *transposed;  // values may be absent
};

// 128 rows of 64 columns. A thread takes vectors of four neighbouring rows at a time, of which it makes words of four
// bytes of a column.
constexpr int kTileThreads = 256, kTileRows = 128, kTileCols = 64, kTileWords = kTileRows / 4,
              kTilePitch = kTileWords + 1;

template <typename X, bool ALIGNED>
__global__ void __launch_bounds__(kTileThreads) round_tiles_kernel(const __grid_constant__ TileRounding p) {
  constexpr int N = kVector<X>, kVectors = kTileCols / N, kStep = kTileThreads / kVectors, kTurns = kTileWords / kStep;
  __shared__ uint32_t tile[kTileCols * kTilePitch];
  __shared__ float reciprocals[kTileCols];
  const int64_t across = (p.of.cols + kTileCols - 1) / kTileCols;
  const int64_t first_col = blockIdx.x % across * kTileCols, first_row = blockIdx.x / across * kTileRows;
  const int vector = threadIdx.x % kVectors * N, word = threadIdx.x / kVectors;
  const int64_t column = first_col + vector;
  const int there = static_cast<int>(max(int64_t{0}, min(int64_t{N}, p.of.cols - column)));

  Packed<X, N> x[kTurns][4];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = first_row + (word + turn * kStep) * 4 + i;
      x[turn][i] =
          load<ALIGNED, N>(static_cast<const X*>(p.of.x) + row * p.of.cols + column, row < p.of.rows ? there : 0);
    }
  if (threadIdx.x < kTileCols && first_col + threadIdx.x < p.of.cols) {
    const float amax = __ldg(p.of.columns.largest + first_col + threadIdx.x), scale = scale_of(p.quantized, amax);
    if (first_row == 0) p.quantized.scales[first_col + threadIdx.x] = amax == 0.0f ? p.quantized.of_zeros : scale;
    reciprocals[threadIdx.x] = 1.0f / scale;
  }
  __syncthreads();

#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    float v[4][N];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = first_row + (word + turn * kStep) * 4 + i;
      const float factor = row < p.of.rows ? p.of.columns.factor(row) : 0.0f;
      unpack(x[turn][i], v[i]);
#pragma unroll
      for (int k = 0; k < N; ++k) v[i][k] = v[i][k] * factor * reciprocals[vector + k];
      if (p.values && row < p.of.rows)
        store<ALIGNED>(p.values + row * p.of.cols + column, pack_quantized<Dtype::f8e4m3fn>(v[i]), there);
    }
#pragma unroll
    for (int k = 0; k < N; ++k)
      tile[(vector + k) * kTilePitch + word + turn * kStep] =
          pack_four<Dtype::f8e4m3fn>(v[0][k], v[1][k], v[2][k], v[3][k]);
  }
  __syncthreads();

  // Sixteen rows of a column at a time.
  constexpr int kRun = 16, kRuns = kTileRows / kRun;
  const bool is_aligned = p.of.rows % kRun == 0 && reinterpret_cast<uintptr_t>(p.transposed) % kRun == 0;
  for (int i = threadIdx.x; i < kTileCols * kRuns; i += kTileThreads) {
    const int col = i / kRuns, run = i % kRuns;
    const int64_t remaining = p.of.rows - first_row - run * kRun;
    if (first_col + col >= p.of.cols || remaining <= 0) continue;
    Packed<uint8_t, kRun> bytes;
#pragma unroll
    for (int k = 0; k < kRun / 4; ++k) bytes.word[k] = tile[col * kTilePitch + run * kRun / 4 + k];
    uint8_t* const to = p.transposed + (first_col + col) * p.of.rows + first_row + run * kRun;
    if (is_aligned) {
      store<true>(to, bytes, kRun);
    } else {
      store<false>(to, bytes, static_cast<int>(min(int64_t{kRun}, remaining)));
    }
  }
}

template <typename X>
cudaError_t round_tiles(const TileRounding& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const int64_t tiles = ((p.of.cols + kTileCols - 1) / kTileCols) * ((p.of.rows + kTileRows - 1) / kTileRows);
  if (tiles > INT_MAX) return cudaErrorInvalidConfiguration;
  const bool is_aligned =
      p.of.cols % N == 0 && aligned_for<N>(kDtype<X>, p.of.x) && reinterpret_cast<uintptr_t>(p.values) % N == 0;
  const auto kernel = is_aligned ? round_tiles_kernel<X, true> : round_tiles_kernel<X, false>;
  return launch_grid(kernel, dim3(static_cast<unsigned>(tiles)), dim3(kTileThreads), stream, p);
}

}  // namespace jaxnorm::cuda
