// The forward of a gated RMS norm, of rows that a block holds.
#pragma once

#include "cuda/ops/forward.cuh"

namespace jaxnorm::cuda {

// How many blocks a multiprocessor shall hold. Of half types four vectors and their gates take more registers, where
// they are not multiplied at once.
template <typename X, typename R, bool FIRST>
struct GatedOccupancy {
  static constexpr bool kHalf = sizeof(X) == 2, kRowsShare = R::kThreads > 0;
  static constexpr int kRegisters = kHalf && R::kVectors == 8                               ? 128
                                    : R::kVectors == 4 && (kRowsShare || (kHalf && !FIRST)) ? 80
                                                                                            : 64;
  static constexpr int kBlocks = resident_blocks(kRegisters, R::kMost);
};

template <typename X, typename R, Access ACCESS, bool FIRST>
__global__ void __launch_bounds__(R::kMost, GatedOccupancy<X, R, FIRST>::kBlocks)
    forward_gated_kernel(const __grid_constant__ Forward p, const __grid_constant__ RowsLaunch launch) {
  forward_rows<Kind::rms, X, R, ACCESS, GatedCall<FIRST>>(p, launch);
}

template <typename X, bool FIRST, typename F>
cudaError_t with_gated_regime(const Plan& plan, F f) {
  if (plan.threads_per_row == 8) {
    if (plan.vectors == 1) return f(Regime<8, 1, 1, kRowsThreads>{});
    return plan.vectors == 2 ? f(Regime<8, 2, 1, kRowsThreads>{}) : f(Regime<8, 4, 1, kRowsThreads>{});
  }
  if (plan.rows_per_block > 1)
    return plan.vectors == 2 ? f(Regime<kWarp, 2, 1, kRowsThreads>{}) : f(Regime<kWarp, 4, 1, kRowsThreads>{});
  constexpr bool kLate = sizeof(X) == 2 && !FIRST;
  if constexpr (sizeof(X) == 4 || kLate)
    if (plan.vectors == 8) return f(Regime<kWholeBlock, 8, 1, max_forward_threads(kDtype<X>)>{});
  return f(Regime<kWholeBlock, 4, 1, kLate ? kGatedThreads : kMaxThreads>{});
}

template <typename X, bool FIRST>
cudaError_t forward_gated_as(const Forward& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const Plan plan = make_gated_forward_plan(kDtype<X>, p.cols, FIRST);
  const auto are_aligned = [](auto... arrays) { return (aligned_for<N>(arrays.dtype, arrays.data) && ...); };
  const bool aligned = p.cols % N == 0 && are_aligned(p.x, p.gate.data, p.y, p.scale);
  return with_gated_regime<X, FIRST>(plan, [&](auto regime) {
    using R = decltype(regime);
    // `at_once`: rows of a thread group, as in the forward without a gate.
    const auto launch_as = [&](auto kernel, int at_once) {
      return launch_groups(kernel, plan, plan.blocks_of(p.rows, at_once), 0, stream, p,
                           RowsLaunch(plan, p.cols, N, p.weight_rows));
    };
    if (aligned) return launch_as(forward_gated_kernel<X, R, Access::vectors, FIRST>, kRowsAtOnce<R, GatedCall<FIRST>>);
    return launch_as(forward_gated_kernel<X, R, Access::elementwise, FIRST>, 1);
  });
}

template <typename X>
cudaError_t forward_gated_of(const Forward& p, cudaStream_t stream) {
  if (p.cols > kGatedCols) return cudaErrorNotSupported;
  return p.gate.first ? forward_gated_as<X, true>(p, stream) : forward_gated_as<X, false>(p, stream);
}

}  // namespace jaxnorm::cuda
