// The forward of a gated RMS norm, of rows that a block holds.
#pragma once

#include "cuda/forward.cuh"

namespace jaxnorm::cuda {

// How many blocks a multiprocessor shall hold. Rows and gates of several teams, and of half types, take registers.
template <typename X, typename R>
struct GatedResidency {
  static constexpr bool kHalf = sizeof(X) == 2, kRowsShare = R::kThreads > 0;
  static constexpr int kRegisters = kHalf ? (R::kVectors == 8 ? 128 : kRowsShare ? 96 : 80) : (kRowsShare ? 80 : 64);
  static constexpr int kBlocks = (64 << 10) / kRegisters / R::kMost;
};

template <typename X, typename R, Access ACCESS, bool FIRST>
__global__ void __launch_bounds__(R::kMost, GatedResidency<X, R>::kBlocks)
    forward_gated_kernel(const __grid_constant__ Forward p, const __grid_constant__ RowsLaunch launch) {
  forward_rows<Kind::rms, X, R, ACCESS, GatedCall<FIRST>>(p, launch);
}

template <typename X, typename F>
cudaError_t with_gated_regime(const Plan& plan, F f) {
  if (plan.threads_per_row == 8) {
    if (plan.vectors == 1) return f(Regime<8, 1, 1, kRowsThreads>{});
    return plan.vectors == 2 ? f(Regime<8, 2, 1, kRowsThreads>{}) : f(Regime<8, 4, 1, kRowsThreads>{});
  }
  if (plan.rows_per_block > 1)
    return plan.vectors == 2 ? f(Regime<kWarp, 2, 1, kRowsThreads>{}) : f(Regime<kWarp, 4, 1, kRowsThreads>{});
  constexpr int most = max_forward_threads(kDtype<X>);
  return plan.vectors == 4 ? f(Regime<kWholeBlock, 4, 1, most>{}) : f(Regime<kWholeBlock, 8, 1, most>{});
}

template <typename X>
cudaError_t forward_gated_of(const Forward& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  if (p.cols > kGatedCols) return cudaErrorNotSupported;
  const Plan plan = make_plan(Op::forward, Kind::rms, kDtype<X>, p.cols, current_device().max_cluster());
  const auto are_aligned = [](auto... arrays) { return (aligned_for<N>(arrays.dtype, arrays.data) && ...); };
  const bool aligned = p.cols % N == 0 && are_aligned(p.x, p.gate.data, p.y, p.scale);
  return with_gated_regime<X>(plan, [&](auto regime) {
    using R = decltype(regime);
    // `at_once`: rows of a team, as in the forward without a gate.
    const auto launch_as = [&](auto kernel, int at_once) {
      return launch_teams(kernel, plan, plan.blocks_of(p.rows, at_once), 0, stream, p,
                          RowsLaunch(plan, p.cols, N, p.heads));
    };
    if (aligned)
      return launch_as(p.gate.first ? forward_gated_kernel<X, R, Access::vectors, true>
                                    : forward_gated_kernel<X, R, Access::vectors, false>,
                       plan.rows_per_team);
    return launch_as(p.gate.first ? forward_gated_kernel<X, R, Access::unaligned, true>
                                  : forward_gated_kernel<X, R, Access::unaligned, false>,
                     1);
  });
}

}  // namespace jaxnorm::cuda
