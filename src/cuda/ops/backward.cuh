// The backward of both norms. With g = dy * (scale + scale_offset) and x_hat rebuilt from the saved statistics,
//   dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat))      (no mean(g) for RMS)
//   dscale = sum over rows of dy * x_hat,   dbias = sum over rows of dy.
// With heads, the rows of each have a dscale and a dbias of their own.
//
// The sums over rows have two stages, both in a fixed order: blocks leave partial sums of their rows in the workspace,
// and sum_partials adds those.
#pragma once

#include "cuda/ops/backward_columns.cuh"
#include "cuda/ops/backward_few.cuh"
#include "cuda/ops/backward_long.cuh"
#include "cuda/ops/backward_rows.cuh"

namespace jaxnorm::cuda {

template <Kind KIND, typename X, typename DY>
cudaError_t launch_backward(const Backward& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  Plan plan = make_plan(Op::backward, KIND, kDtype<X>, p.cols, current_device().max_cluster());
  if (p.dsum) plan = beside_extra_operand(plan);
  // Rows of dy as well are whole multiples of 16 bytes: they may be copied in bulk.
  const bool aligned = p.cols % N == 0 && p.cols % kVector<DY> == 0 && p.dy_pad % kVector<DY> == 0 &&
                       aligned_for<N>(p.x.dtype, p.x.data) && aligned_for<kVector<DY>>(p.dy.dtype, p.dy.data) &&
                       aligned_for<N>(p.dx.dtype, p.dx.data) && aligned_for<N>(p.scale.dtype, p.scale.data) &&
                       aligned_for<N>(p.dsum.dtype, p.dsum.data) && aligned_for<N>(Dtype::f32, p.workspace);

  if constexpr (std::is_same_v<X, DY>)
    if (aligned && is_small_batch(p, plan))
      return with_backward_regime<KIND, X>(plan, [&](auto regime) {
        using R = decltype(regime);
        if constexpr (R::kCluster == 1) return launch_small_batch<KIND, Extra::none, X, R>(p, plan, stream);
        return cudaErrorInvalidValue;  // not reached
      });

  // The workspace has room for the most partial rows of dscale, then of dbias; few rows fill fewer of them.
  const int64_t count = p.weight_rows.count, most = partial_rows(kDtype<X>, p.cols, p.weight_rows);
  const RowSchedule schedule = schedule_rows(kDtype<X>, p.cols, p.rows, p.weight_rows, plan.rows_per_block);
  Partials partials{};
  partials.rows = schedule.partial_rows;
  if (p.dscale) partials.dscale = p.workspace;
  if (p.dbias) partials.dbias = p.workspace + (p.dscale ? most * count * p.cols : 0);
  if (!fits(schedule, plan, most) || (plan.segments > 0 && count > 1)) return cudaErrorInvalidValue;

  cudaError_t error = cudaSuccess;
  if (p.rows > 0 && (p.dx || p.dscale || p.dbias)) {
    constexpr bool kLayer = KIND == Kind::layer;
    error = cudaErrorNotSupported;
    if (plan.segments > 0) {
      if constexpr (KIND == Kind::rms && std::is_same_v<X, float> && std::is_same_v<DY, float>)
        if (plan.blocks_per_row > 1) error = launch_long<X>(p, plan, schedule, partials, aligned, stream);
      if (error == cudaErrorNotSupported) {
        if (aligned) partials.rows = std::min(partials.rows, rows_of_column_blocks(kDtype<X>, p.cols));
        error = launch_columns<KIND, X, DY>(p, plan.segments, partials, aligned, stream);
      }
    } else if (p.dsum && aligned && (kLayer || !p.dbias)) {
      error = launch_rows<KIND, kLayer, Extra::dsum, X, DY>(p, plan, schedule, partials, aligned, stream);
    }
    if (error == cudaErrorNotSupported)
      error = kLayer || p.dbias
                  ? launch_rows<KIND, true, Extra::none, X, DY>(p, plan, schedule, partials, aligned, stream)
                  : launch_rows<KIND, kLayer, Extra::none, X, DY>(p, plan, schedule, partials, aligned, stream);
  }
  if (error == cudaSuccess && (p.dscale || p.dbias)) error = sum_partials(p, partials, stream);
  return error;
}

template <Kind KIND, typename X>
cudaError_t backward_of_kind(const Backward& p, cudaStream_t stream) {
  if (p.dy.dtype == kDtype<X>) return launch_backward<KIND, X, X>(p, stream);
  if constexpr (std::is_same_v<X, float>) {
    return p.dy.dtype == Dtype::f16 ? launch_backward<KIND, X, __half>(p, stream)
                                    : launch_backward<KIND, X, __nv_bfloat16>(p, stream);
  } else {
    return launch_backward<KIND, X, float>(p, stream);
  }
}

template <typename X>
cudaError_t backward_of(const Backward& p, cudaStream_t stream) {
  return p.kind == Kind::rms ? backward_of_kind<Kind::rms, X>(p, stream) : backward_of_kind<Kind::layer, X>(p, stream);
}

}  // namespace jaxnorm::cuda
