// Rows rounded to float8, by a block each; and on the way, if wanted, the largest magnitudes of columns.
#pragma once

#include "ops/float8_linear/cuda.h"
#include "ops/float8_linear/cuda/magnitudes.cuh"
#include "ops/shared/cuda/quantize_row.cuh"

namespace jaxnorm::cuda {

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

inline Quantization to_float8(const Rounding& p, const Output& values, float* scales) {
  Quantization q;
  q.values = {values.data, Dtype::f8e4m3fn};
  q.scales = scales, q.group = p.cols, q.power_of_two = p.power_of_two;
  q.max_scale = INFINITY, q.of_zeros = 0.0f;
  return q;
}

template <typename X>
cudaError_t run_round_rows(const RoundRows& p, cudaStream_t stream) {
  return round_rows<X>({p.x.data, p.factors, p.rows, to_float8(p, p.values, p.scales), {}}, stream);
}

}  // namespace jaxnorm::cuda
