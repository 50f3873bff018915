// The backward of both norms. With g = dy * (scale + scale_offset) and x_hat rebuilt from the saved statistics,
//   dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat))      (no mean(g) for RMS)
//   dscale = sum over rows of dy * x_hat,   dbias = sum over rows of dy.
//
// The sums over rows have two stages, both in a fixed order: blocks leave partial sums of their rows in the workspace,
// and sum_partials_kernel adds those.
#pragma once

#include "cuda/backward_columns.cuh"
#include "cuda/backward_rows.cuh"

namespace jaxnorm::cuda {

constexpr int kSumThreads = 512;

// Adds the partial sums. Thread (x, y) adds partial rows y, y + blockDim.y, ... of a column, then thread (x, 0) those
// sums.
static __global__ void __launch_bounds__(kSumThreads) sum_partials_kernel(Backward p, Partials partials) {
  const bool is_scale = blockIdx.y == 0 && partials.dscale;
  const float* from = is_scale ? partials.dscale : partials.dbias;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  __shared__ float sums[kSumThreads];

  float sum = 0;
  if (col < p.cols)
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < partials.used; row += blockDim.y) sum += from[row * p.cols + col];
  sums[threadIdx.y * blockDim.x + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= p.cols) return;
  for (unsigned y = 1; y < blockDim.y; ++y) sum += sums[y * blockDim.x + threadIdx.x];
  store_float(is_scale ? p.dscale : p.dbias, col, sum);
}

inline void launch_sum_partials(const Backward& p, const Partials& partials, cudaStream_t stream) {
  // The fewer the columns, the more threads share one.
  const unsigned width = p.cols <= 4096 ? 32 : p.cols <= 65536 ? 128 : kSumThreads;
  const dim3 grid(static_cast<unsigned>((p.cols + width - 1) / width), partials.dscale && partials.dbias ? 2 : 1);
  sum_partials_kernel<<<grid, dim3(width, kSumThreads / width), 0, stream>>>(p, partials);
}

template <Kind KIND, typename X, typename DY>
cudaError_t launch_backward(const Backward& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const Plan plan = make_plan(Op::backward, kDtype<X>, p.cols, max_cluster());
  const bool aligned = p.cols % N == 0 && aligned_for<N>(p.x.dtype, p.x.data) &&
                       aligned_for<N>(p.dy.dtype, p.dy.data) && aligned_for<N>(p.dx.dtype, p.dx.data) &&
                       aligned_for<N>(p.scale.dtype, p.scale.data) && aligned_for<N>(Dtype::f32, p.workspace);

  Partials partials{};
  partials.rows = partial_rows(KIND, kDtype<X>, p.cols);
  partials.used = std::min(partials.rows, (p.rows + plan.rows_per_block - 1) / plan.rows_per_block);
  if (p.dscale) partials.dscale = p.workspace;
  if (p.dbias) partials.dbias = p.workspace + (p.dscale ? partials.rows * p.cols : 0);

  // What the rows kernel sums up on its way to dx, and what is left for the columns kernel.
  const bool by_rows = p.dx && plan.segments == 0;
  Partials on_the_way{}, rest = partials;
  if (by_rows) std::swap(on_the_way, rest);
  if (by_rows && KIND == Kind::rms) std::swap(on_the_way.dbias, rest.dbias);
  rest.rows = partials.rows;
  rest.used = partials.used;

  cudaError_t error = cudaSuccess;
  if (p.rows > 0 && by_rows) error = launch_rows<KIND, X, DY>(p, plan, on_the_way, aligned, stream);
  const bool segments = p.dx && plan.segments > 0;
  if (error == cudaSuccess && p.rows > 0 && (segments || rest.dscale || rest.dbias)) {
    Backward columns = p;
    if (!segments) columns.dx = {};
    error = launch_columns<KIND, X, DY>(columns, segments ? plan.segments : 0, rest, aligned, stream);
  }
  if (error != cudaSuccess || !(p.dscale || p.dbias)) return error;
  launch_sum_partials(p, partials, stream);
  return cudaGetLastError();
}

template <Kind KIND, typename X>
cudaError_t backward_of_kind(const Backward& p, cudaStream_t stream) {
  if (p.dy.dtype == kDtype<X>) return launch_backward<KIND, X, X>(p, stream);
  if constexpr (std::is_same_v<X, float>)
    return p.dy.dtype == Dtype::f16 ? launch_backward<KIND, X, __half>(p, stream)
                                    : launch_backward<KIND, X, __nv_bfloat16>(p, stream);
  return launch_backward<KIND, X, float>(p, stream);
}

template <typename X>
cudaError_t backward_of(const Backward& p, cudaStream_t stream) {
  return p.kind == Kind::rms ? backward_of_kind<Kind::rms, X>(p, stream) : backward_of_kind<Kind::layer, X>(p, stream);
}

}  // namespace jaxnorm::cuda
