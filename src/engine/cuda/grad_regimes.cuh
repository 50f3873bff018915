// From a plan of the backward to the type that its kernels are compiled for.
#pragma once

#include "engine/cuda/launch.cuh"

namespace jaxnorm::cuda {

template <typename... R>
struct RegimeList {};

template <typename... A, typename... B>
constexpr RegimeList<A..., B...> operator+(RegimeList<A...>, RegimeList<B...>) {
  return {};
}

// Whether the kernels of a regime serve a plan.
template <typename R>
constexpr bool serves(const Plan& plan) {
  if (plan.vectors != R::kVectors || plan.block_threads() > R::kMost || plan.blocks_per_row > R::kCluster) return false;
  if (R::kThreads > 0) return plan.threads_per_row == R::kThreads;
  if (R::kThreads == kWholeWarps) return plan.threads_per_row > kWarp;
  return plan.rows_per_block == 1 && (plan.blocks_per_row > 1) == (R::kCluster > 1);
}

// Calls f with the first regime of a list that serves a plan. A test sees to it that there is one for every plan.
template <typename F, typename R, typename... More>
cudaError_t with_regime(RegimeList<R, More...>, const Plan& plan, F f) {
  if (serves<R>(plan)) return f(R{});
  if constexpr (sizeof...(More) > 0) return with_regime(RegimeList<More...>{}, plan, f);
  return cudaErrorInvalidConfiguration;
}

// Those of the list without clusters and without more elements a thread than kElements.
template <typename X, typename... R>
constexpr auto small_batch_regimes(RegimeList<R...>) {
  return (std::conditional_t < R::kCluster == 1 && R::kVectors * kVector<X> <= kElements, RegimeList<R>,
          RegimeList < >> {} + ... + RegimeList<>{});
}

// The tables. A block of as many threads as a regime may have leaves its registers: 128 a thread of 512, 96 of 640, 80
// of 768. Of rows longer than one block's, clusters of RMS norm of half types have twice the vectors a thread.
template <Kind KIND, typename X>
constexpr auto grad_regimes() {
  constexpr int most = kElements / kVector<X>;
  using Shared = RegimeList<Regime<16, most, 1>, Regime<kWarp, most, 1>, Regime<kWholeWarps, most, 1>,
                            Regime<kWholeBlock, most, kMaxCluster>>;
  if constexpr (sizeof(X) == 4) {
    return RegimeList<Regime<8, 1, 1>, Regime<8, 2, 1>, Regime<8, most, 1>>{} + Shared{};
  } else {
    constexpr auto half =
        RegimeList<Regime<8, 1, 1>, Regime<8, most, 1>>{} + Shared{} +
        RegimeList<Regime<kWholeWarps, most, 1, kWideThreads>, Regime<kWholeWarps, 1, 1, kThinThreads>>{};
    if constexpr (KIND == Kind::layer) {
      return half;
    } else {
      return half + RegimeList<Regime<kWholeBlock, 2 * most, kMaxCluster>>{};
    }
  }
}

// Of ops that have much to compute beside three arrays: blocks of half types have more threads of one vector each.
template <typename X>
constexpr auto busy_grad_regimes() {
  constexpr int most = kElements / kVector<X>;
  constexpr RegimeList<Regime<kWholeBlock, 2 * most, 1>> longest;
  if constexpr (sizeof(X) == 4) {
    return grad_regimes<Kind::rms, X>() + longest;
  } else {
    return RegimeList<Regime<8, 1, 1, kThinThreads>, Regime<16, 1, 1, kThinThreads>, Regime<kWarp, 1, 1, kThinThreads>,
                      Regime<kWholeWarps, most, 1>, Regime<kWholeWarps, 1, 1>, Regime<kWholeWarps, 1, 1, kWideThreads>,
                      Regime<kWholeWarps, 1, 1, kThinThreads>, Regime<kWholeBlock, most, kMaxCluster>>{} +
           longest;
  }
}

}  // namespace jaxnorm::cuda
