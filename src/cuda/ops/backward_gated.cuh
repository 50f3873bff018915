// The backward of a gated RMS norm.
#pragma once

#include "cuda/norms.h"
#include "cuda/ops/backward_few.cuh"
#include "cuda/ops/backward_rows.cuh"

namespace jaxnorm::cuda {

// Of half types, blocks of one vector a thread have as many registers as their threads leave.
template <typename X, typename F>
cudaError_t with_gated_backward_regime(const Plan& plan, F f) {
  constexpr int most = kElements / kVector<X>;
  if (plan.vectors > most) return f(Regime<kWholeBlock, 2 * most, 1>{});
  if constexpr (sizeof(X) == 4) {
    return with_backward_regime<Kind::rms, X>(plan, f);
  } else {
    if (plan.blocks_per_row > 1) return f(Regime<kWholeBlock, most, kMaxCluster>{});
    if (plan.threads_per_row == 8) return f(Regime<8, 1, 1, kThinThreads>{});
    if (plan.threads_per_row == 16) return f(Regime<16, 1, 1, kThinThreads>{});
    if (plan.threads_per_row == kWarp) return f(Regime<kWarp, 1, 1, kThinThreads>{});
    if (plan.vectors == most) return f(Regime<kWholeWarps, most, 1>{});
    if (plan.block_threads() <= kMaxThreads) return f(Regime<kWholeWarps, 1, 1, kMaxThreads>{});
    if (plan.block_threads() <= kWideThreads) return f(Regime<kWholeWarps, 1, 1, kWideThreads>{});
    return f(Regime<kWholeWarps, 1, 1, kThinThreads>{});
  }
}

template <typename X>
cudaError_t launch_gated_rows(const Backward& p, const Plan& plan, const RowSchedule& schedule,
                              const Partials& partials, bool aligned, cudaStream_t stream) {
  RowsLaunch launch(plan, p.cols, kVector<X>, p.weight_rows);
  launch.take_turns(schedule.step, schedule.end);
  launch.sums = schedule.sums;
  const PipelineArray array{sizeof(X), p.cols};
  const int sums = plan.rows_per_block > 1 ? plan.block_threads() * kElements * int{sizeof(float)} : 0;
  return with_gated_backward_regime<X>(plan, [&](auto regime) {
    using R = decltype(regime);
    const int pipeline = aligned ? launch.with_pipelines(plan, p.cols, {array, array, array}, 1) : 0;
    const auto launch_as = [&](auto kernel) {
      return launch_groups(kernel, plan, schedule.blocks, std::max(pipeline, sums), stream, p, partials, launch);
    };
    if constexpr (R::kVectors * kVector<X> <= kElements)
      if (pipeline > 0)
        return launch_as(p.gate.first
                             ? backward_kernel<Kind::rms, false, Extra::gate_first, X, X, R, Access::pipelined>
                             : backward_kernel<Kind::rms, false, Extra::gate_last, X, X, R, Access::pipelined>);
    // What is rare has one kernel for both orders.
    if constexpr (R::kCluster == 1)
      if (aligned) return launch_as(backward_kernel<Kind::rms, false, Extra::gate, X, X, R, Access::vectors>);
    return launch_as(backward_kernel<Kind::rms, false, Extra::gate, X, X, R, Access::elementwise>);
  });
}

template <typename X>
cudaError_t backward_gated_of(const Backward& p, cudaStream_t stream) {
  if (p.cols > kGatedCols) return cudaErrorNotSupported;
  constexpr int N = kVector<X>;
  const Plan plan = make_gated_backward_plan(kDtype<X>, p.cols, current_device().max_cluster());
  const auto are_aligned = [](auto... arrays) { return (aligned_for<N>(arrays.dtype, arrays.data) && ...); };
  const bool aligned = p.cols % N == 0 && aligned_for<N>(Dtype::f32, p.workspace) &&
                       are_aligned(p.x, p.gate.data, p.dy, p.scale, p.dx, p.dgate);
  if (p.weight_rows.inner != 1) return cudaErrorInvalidValue;
  if (aligned && is_small_batch(p, plan) && plan.vectors <= kElements / N)
    return with_gated_backward_regime<X>(plan, [&](auto regime) {
      using R = decltype(regime);
      if constexpr (R::kCluster == 1 && R::kVectors * N <= kElements)
        return launch_small_batch<Kind::rms, Extra::gate, X, R>(p, plan, stream);
      return cudaErrorInvalidValue;  // not reached
    });
  const RowSchedule schedule = schedule_rows(kDtype<X>, p.cols, p.rows, p.weight_rows, plan.rows_per_block);
  if (!fits(schedule, plan, partial_rows(kDtype<X>, p.cols, p.weight_rows))) return cudaErrorInvalidValue;
  Partials partials{};
  partials.rows = schedule.partial_rows;
  if (p.dscale) partials.dscale = p.workspace;

  cudaError_t error = cudaSuccess;
  if (p.rows > 0 && (p.dx || p.dgate || p.dscale))
    error = launch_gated_rows<X>(p, plan, schedule, partials, aligned, stream);
  if (error == cudaSuccess && p.dscale) error = sum_partials(p, partials, stream);
  return error;
}

}  // namespace jaxnorm::cuda
