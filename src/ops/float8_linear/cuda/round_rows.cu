// Rows rounded to float8, by a block each; and on the way, if wanted, the largest magnitudes of columns. So a gradient
// is rounded both by rows and by columns, with factors of their own: one kernel has the rows and finds the columns'
// largest magnitudes, another one has the columns. That is as many bytes as by two kernels that know nothing of each
// other, and neither has to hold a column.
#include "engine/cuda/device.h"
#include "ops/float8_linear/cuda/rounding.cuh"
#include "ops/shared/cuda/quantize.cuh"

namespace jaxnorm::cuda {

// The largest magnitudes of a block's rows, in shared memory: each thread reads and writes those of its own columns,
// vectors of N.
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

struct RowRounding {
  const void* x;
  const float* factors;
  int64_t rows;
  Quantization quantized;
  Magnitudes columns;  // of what the factors of rows make of x
};

template <typename X, int N, int HELD, int WARPS>
__global__ void __launch_bounds__(WARPS* kWarp) round_rows_kernel(const __grid_constant__ RowRounding p) {
  const int64_t cols = p.quantized.group;
  SharedMagnitudes<N> columns(p.columns, cols);
  int turn = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const X* const x = static_cast<const X*>(p.x) + row * cols;
    const float of_row = p.columns.factor(row);
    quantize_group<N, HELD, WARPS>(p.quantized, row, turn++ % 2, [&](int64_t column, int count, float (&v)[N]) {
      unpack(load<true, N>(x + column, count), v);
      if (p.columns.largest && count) columns.add(column, v, of_row);
      if (!p.factors) return;
      float factors[N];
      load_floats<true>({p.factors, Dtype::f32}, column, count, factors);
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] *= factors[i];
    });
  }
  if (p.columns.largest) columns.give_to_all();
}

template <typename X, int N, int HELD, int WARPS>
cudaError_t launch_round_rows(const RowRounding& p, cudaStream_t stream) {
  const int64_t cols = p.quantized.group;
  Plan plan{};
  plan.threads_per_row = row_warps<N, HELD, WARPS>(cols) * kWarp, plan.rows_per_block = 1, plan.blocks_per_row = 1;
  if (!p.columns.largest) return launch_groups(round_rows_kernel<X, N, HELD, WARPS>, plan, p.rows, 0, stream, p);
  const int bytes = SharedMagnitudes<N>::bytes(cols);
  const Device& device = current_device();
  const int64_t held = std::max(1, std::min(device.shared_bytes / (bytes + kOwnBytes), 1024 / plan.threads_per_row));
  const int64_t blocks = std::min(p.rows, device.multiprocessors * held);
  return launch_groups(round_rows_kernel<X, N, HELD, WARPS>, plan, blocks, bytes, stream, p);
}

template <typename X>
cudaError_t round_rows(const RowRounding& p, cudaStream_t stream) {
  constexpr int N = kVector<X>, kHeld = 32 / N;
  const int64_t cols = p.quantized.group;
  if (p.rows == 0) return cudaSuccess;
  const bool is_aligned =
      cols % N == 0 && are_aligned<N>(Input{p.x, kDtype<X>}, p.quantized.values, Input{p.factors, Dtype::f32});
  if (!is_aligned) return launch_round_rows<X, 1, 0, kMostRowWarps>(p, stream);
  if (is_held<N, kHeld, kMostRowWarps>(cols)) return launch_round_rows<X, N, kHeld, kMostRowWarps>(p, stream);
  if (is_held<N, kHeld, 2 * kMostRowWarps>(cols)) return launch_round_rows<X, N, kHeld, 2 * kMostRowWarps>(p, stream);
  return launch_round_rows<X, N, 0, kMostRowWarps>(p, stream);
}

template <typename X>
cudaError_t run_round_rows(const RoundRows& p, cudaStream_t stream) {
  return round_rows<X>({p.x.data, p.factors, p.rows, to_float8(p, p.values, p.scales), {}}, stream);
}

template <typename X>
cudaError_t run_round_gradient(const RoundGradient& p, cudaStream_t stream) {
  if (p.workspace.floats < p.cols) return cudaErrorMemoryAllocation;
  const ColumnsOf columns{p.x.data, p.rows, p.cols, {p.workspace.data, p.of_rows}};
  cudaError_t error = cudaMemsetAsync(p.workspace.data, 0, p.cols * sizeof(float), stream);
  const bool together = p.values && p.cols <= (current_device().shared_bytes - kOwnBytes) / int64_t{sizeof(float)};
  if (error == cudaSuccess && p.values) {
    const RowRounding rows{p.x.data, p.of_columns, p.rows, to_float8(p, p.values, p.scales),
                           together ? columns.columns : Magnitudes{}};
    error = round_rows<X>(rows, stream);
  }
  if (error == cudaSuccess && !together) error = largest_of_columns<X>(columns, stream);
  if (error != cudaSuccess) return error;
  return round_tiles<X>(
      {columns, to_float8(p, p.transposed, p.column_scales), nullptr, static_cast<uint8_t*>(p.transposed.data)},
      stream);
}

Outcome run(const RoundRows& p, Stream stream) {
  return {with_dtype(p.x.dtype, [&](auto x) { return run_round_rows<decltype(x)>(p, stream); })};
}

Outcome run(const RoundGradient& p, Stream stream) {
  return {with_dtype(p.x.dtype, [&](auto x) { return run_round_gradient<decltype(x)>(p, stream); })};
}

}  // namespace jaxnorm::cuda
