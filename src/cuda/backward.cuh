// The backward of both norms. With g = dy * (scale + scale_offset) and x_hat rebuilt from the saved statistics,
//   dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat))      (no mean(g) for RMS)
//   dscale = sum over rows of dy * x_hat,   dbias = sum over rows of dy.
//
// The sums over rows have two stages, both in a fixed order: blocks leave partial sums of their rows in the workspace, and
// sum_partials_kernel adds those.
#pragma once

#include "cuda/backward_columns.cuh"
#include "cuda/backward_rows.cuh"

namespace jaxnorm::cuda {

// Adds the partial sums, 32 columns a block: warp w adds partial rows w, w + 32, ..., then warp 0 adds the warps' sums.
static __global__ void __launch_bounds__(1024) sum_partials_kernel(Backward p, Partials partials) {
  const bool is_scale = blockIdx.y == 0 && partials.dscale;
  const float* from = is_scale ? partials.dscale : partials.dbias;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  __shared__ float sums[32][33];

  float sum = 0;
  if (col < p.cols)
    for (int64_t row = threadIdx.y; row < partials.used; row += 32) sum += from[row * p.cols + col];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= p.cols) return;
  sum = 0;
  for (int i = 0; i < 32; ++i) sum += sums[i][threadIdx.x];
  store_float(is_scale ? p.dscale : p.dbias, col, sum);
}

template <Kind KIND, typename X, typename DY>
cudaError_t launch_backward(const Backward& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const Plan plan = make_plan(Op::backward, kDtype<X>, p.cols, max_cluster());
  const bool aligned = p.cols % N == 0 && aligned_for<N>(p.x.dtype, p.x.data) && aligned_for<N>(p.dy.dtype, p.dy.data) &&
                       aligned_for<N>(p.dx.dtype, p.dx.data) && aligned_for<N>(p.scale.dtype, p.scale.data) &&
                       aligned_for<N>(Dtype::f32, p.workspace);

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
  const dim3 grid(static_cast<unsigned>((p.cols + 31) / 32), p.dscale && p.dbias ? 2 : 1);
  sum_partials_kernel<<<grid, dim3(32, 32), 0, stream>>>(p, partials);
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
