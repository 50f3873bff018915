// The largest magnitudes of columns, each of which blocks find in some rows: an atomic maximum does not depend on the
// order in which they come.
#pragma once

#include "engine/cuda/launch.cuh"
#include "ops/shared/cuda/quantize.cuh"

namespace jaxnorm::cuda {

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

// Those of a block's rows, in shared memory: each thread reads and writes those of its own columns, vectors of N.
template <int N>
class SharedMagnitudes {
  // Vectors of 8 lie as two halves apart: neighbouring threads are to have neighbouring words.
  static constexpr int kHalves = N > 4 ? 2 : 1, kPart = N / kHalves;

 public:
  static int bytes(int64_t cols) { return static_cast<int>(cols * sizeof(float)); }

  __device__ SharedMagnitudes(const Magnitudes& all, int64_t cols)
      : all_(all), own_(reinterpret_cast<float*>(dynamic_shared())), cols_(cols) {
    if (!all.largest) return;
    for (int64_t i = threadIdx.x; i < cols; i += blockDim.x) own_[i] = 0.0f;
    __syncthreads();
  }

  __device__ void add(int64_t column, const float (&v)[N], float factor) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float* const at = own_ + (half * cols_ + column) / kHalves;
      float largest[kPart];
      unpack(load_shared<kPart>(at), largest);
#pragma unroll
      for (int i = 0; i < kPart; ++i) largest[i] = larger_magnitude(largest[i], v[half * kPart + i] * factor);
      store_shared(at, largest);
    }
  }

  __device__ void give_to_all() {
    __syncthreads();
    for (int64_t i = threadIdx.x; i < cols_; i += blockDim.x) {
      const int64_t half = i * kHalves / cols_, within = i - half * cols_ / kHalves;
      all_.give(within / kPart * N + half * kPart + within % kPart, own_[i]);
    }
  }

 private:
  const Magnitudes& all_;
  float* const own_;
  const int64_t cols_;
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

}  // namespace jaxnorm::cuda
