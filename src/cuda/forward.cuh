// The forward of both norms: one pass over memory, the row in registers or shared memory between its statistics and its
// epilogue.
#pragma once

#include "cuda/forward_few.cuh"
#include "cuda/forward_rows.cuh"
#include "cuda/norms.h"

namespace jaxnorm::cuda {

// Of so many threads three blocks of a half type fit a multiprocessor, if each thread has 96 registers. Rows that
// vectors do not divide take more.
constexpr int kFewThreads = 192;

// Whether the scale is held as it is in memory, beside the row and nothing else.
template <typename X, typename C>
constexpr bool holds_scale() {
  if constexpr (C::kKnown && !C::kAdds) return std::is_same_v<typename C::Weight, X>;
  return false;
}

// How many blocks a multiprocessor shall hold: what bounds the registers, with the threads of a block.
template <Kind KIND, typename X, typename R, Access ACCESS, typename C>
struct Residency {
  static constexpr bool kCluster = R::kCluster > 1, kRing = ACCESS == Access::ring || ACCESS == Access::ring_elements;
  static constexpr bool kUnpacked = sizeof(X) == 2;  // in twice as many registers
  static constexpr bool kManyRows =
      R::kThreads > 0 && (R::kVectors * kRowsAtOnce<R, C>) == 4;  // or many of their vectors
  // With 64 registers the compiler would put off the scale's loads until the row's sums are known. Layer norm, whose
  // weights have no room in 80 either, is slower with fewer blocks.
  static constexpr bool kHoldsScale = KIND == Kind::rms && kUnpacked && R::kThreads == kWholeBlock &&
                                      R::kVectors == 4 && ACCESS == Access::vectors && holds_scale<X, C>();
  static constexpr int kRegisters = kRing                                        ? 128
                                    : kUnpacked && R::kVectors == 8 && !kCluster ? (R::kMost == kFewThreads ? 96 : 128)
                                    : kManyRows || kHoldsScale                   ? 80
                                                                                 : 64;
  static constexpr int kBlocks = resident_blocks(kRegisters, R::kMost);
};

template <Kind KIND, typename X, typename R, Access ACCESS, typename C>
__global__ void __launch_bounds__(R::kMost, Residency<KIND, X, R, ACCESS, C>::kBlocks)
    forward_kernel(const __grid_constant__ Forward p, const __grid_constant__ RowsLaunch launch) {
  if constexpr (R::kCluster > 1 && !kHasClusters) {
    return;
  } else if constexpr (ACCESS == Access::ring || ACCESS == Access::ring_elements) {
    forward_ring<KIND, X, R, ACCESS, C>(p, launch, dynamic_shared());
  } else {
    forward_rows<KIND, X, R, ACCESS, C>(p, launch);
  }
}

// `divided`: whether vectors divide the row.
template <typename X, typename F>
cudaError_t with_forward_regime(const Plan& plan, bool divided, F f) {
  const bool cluster = plan.blocks_per_row > 1;
  if (plan.vectors == kStreamed)
    return cluster ? f(Regime<kWholeBlock, kStreamed, kMaxCluster>{}) : f(Regime<kWholeBlock, kStreamed, 1>{});
  if (cluster)
    return plan.vectors == 4 ? f(Regime<kWholeBlock, 4, kMaxCluster>{}) : f(Regime<kWholeBlock, 8, kMaxCluster>{});
  if (plan.threads_per_row == 8) {
    if (plan.vectors == 1) return f(Regime<8, 1, 1, kRowsThreads>{});
    return plan.vectors == 2 ? f(Regime<8, 2, 1, kRowsThreads>{}) : f(Regime<8, 4, 1, kRowsThreads>{});
  }
  if (plan.rows_per_block > 1)
    return plan.vectors == 2 ? f(Regime<kWarp, 2, 1, kRowsThreads>{}) : f(Regime<kWarp, 4, 1, kRowsThreads>{});
  if (plan.vectors == 4) return f(Regime<kWholeBlock, 4, 1, max_forward_threads(kDtype<X>)>{});
  if constexpr (sizeof(X) == 2)
    if (divided && plan.threads_per_row <= kFewThreads) return f(Regime<kWholeBlock, 8, 1, kFewThreads>{});
  return f(Regime<kWholeBlock, 8, 1, max_forward_threads(kDtype<X>)>{});
}

// What models have is known to the compiler: weights of x's type or f32, RMS norm without a bias, layer norm rounded
// once.
template <Kind KIND, typename X, typename F>
auto with_call(const Forward& p, F f) {
  constexpr bool kRms = KIND == Kind::rms;
  const auto all_are = [&](Dtype dtype) { return p.scale.dtype == dtype && (!p.bias || p.bias.dtype == dtype); };
  const bool rounds = !p.multiply_before_cast && p.y.dtype != Dtype::f32;
  if (!p.scale || p.y.dtype != kDtype<X> || (kRms ? bool{p.bias} : rounds)) return f(AnyCall{});
  // RMS norm's second choice is whether it rounds, which f32 never does, layer norm's whether it has a bias.
  const bool second = kRms ? rounds : bool{p.bias};
  if constexpr (!kRms || sizeof(X) < 4)
    if (all_are(kDtype<X>) && second) return f(Call<X, !kRms, kRms>{});
  if (all_are(kDtype<X>)) return f(Call<X, false, false>{});
  if constexpr (sizeof(X) < 4)
    if (all_are(Dtype::f32)) return second ? f(Call<float, !kRms, kRms>{}) : f(Call<float, false, false>{});
  return f(AnyCall{});
}

template <Kind KIND, typename X>
bool is_known_call(const Forward& p) {
  return with_call<KIND, X>(p, [](auto call) { return decltype(call)::kKnown; });
}

// With a residual, only what is aligned and known to the compiler: cudaErrorNotSupported if this is not.
template <Kind KIND, typename X, typename R, typename C>
cudaError_t launch_forward(const Forward& p, const Plan& plan, cudaStream_t stream) {
  using Y = typename C::template Result<X>;
  constexpr int N = kVector<X>;
  // Rows that are read again in each pass go one at a time.
  const int64_t teams = plan.blocks_of(p.rows, kRowsAtOnce<R, C>), teams_of_one = plan.blocks_of(p.rows, 1);
  RowsLaunch launch(plan, p.cols, N, p.heads);
  const auto launch_as = [&](auto access, int64_t blocks_or_clusters, int shared_bytes) {
    constexpr Access kAccess = decltype(access)::value;
    return launch_teams(forward_kernel<KIND, X, R, kAccess, typename Seen<X, kAccess, C>::Call>, plan,
                        blocks_or_clusters, shared_bytes, stream, p, launch);
  };
  const auto are_aligned = [](auto... arrays) { return (aligned_for<N>(arrays.dtype, arrays.data) && ...); };
  const bool divided = p.cols % N == 0 && p.cols % kVector<Y> == 0;
  const bool aligned = divided && p.y_pad % N == 0 && p.y_pad % kVector<Y> == 0 &&
                       are_aligned(p.x, p.residual, p.y, p.sum, p.scale, p.bias);
  if constexpr (!C::kKnown) {
    // Heads and padding leave a row the sums that it has without them. Of half types those are of vectors anyway.
    if constexpr (sizeof(X) == 4 && R::kCluster == 1 && R::kVectors != kStreamed && R::kMost != kFewThreads)
      if ((p.heads.count > 1 || p.y_pad > 0) && !divided && is_known_call<KIND, X>(p))
        return launch_as(AccessAs<Access::elements>{}, teams_of_one, 0);
    return aligned ? launch_as(AccessAs<Access::vectors>{}, teams, 0)
                   : launch_as(AccessAs<Access::unaligned>{}, teams_of_one, 0);
  } else {
    if constexpr (R::kCluster == 1) {
      // Without a residual padding is rare, and costs registers.
      if constexpr (!C::kAdds)
        if (p.y_pad > 0) return launch_forward<KIND, X, R, AnyCall>(p, plan, stream);
      if constexpr (kMayBeFew<R, C>)
        if (aligned && are_few<R>(p)) return launch_few<KIND, X, R, C>(p, plan, launch, stream);
      // With weights that may be on their way to shared memory.
      const auto launch_rows = [&](auto access) {
        using W = Walk<X, R, decltype(access)::value>;
        return launch_as(access, teams, plan.block_threads() * Weights<KIND, X, R, W, C>::kSharedBytes);
      };
      if (aligned) return launch_rows(AccessAs<Access::vectors>{});
      if constexpr (R::kMost != kFewThreads && !C::kAdds && !C::kHeads) {
        // Whatever is aligned to less than vectors is shifted, but for f32: its vectors have fewer elements, and rows
        // that they do not divide would take longer so.
        if constexpr (sizeof(X) == 2)
          if (are_aligned(p.scale, p.bias)) return launch_rows(AccessAs<Access::shifted>{});
        if constexpr (sizeof(X) == 4)
          if (!divided) return launch_rows(AccessAs<Access::elements>{});
      }
    } else if (C::kAdds ? aligned && aligned_for<kVector<Y>>(p.x.dtype, p.x.data) : aligned || !divided) {
      // What comes by way of a ring is copied in bulk, and so aligned to 16 bytes.
      const int bytes = C::kAdds ? launch.with_rings(plan, p.cols, {{sizeof(Y), p.cols}, {sizeof(X), p.cols}}, 2)
                                 : launch.with_rings(plan, p.cols, {{sizeof(X), p.cols}}, 2);
      const int64_t at_once = std::min<int64_t>(teams, current_device().teams_at_once(plan.blocks_per_row));
      launch.take_turns(at_once, p.rows);
      if (bytes > 0 && divided) {
        if constexpr (kDraws<KIND, X>) {
          const cudaError_t error = launch.draw_rows(at_once, p.rows, p.drawn, stream);
          if (error != cudaSuccess) return error;
        }
        return launch_as(AccessAs<Access::ring>{}, at_once, bytes);
      }
      if constexpr (!C::kAdds)
        if (bytes > 0) return launch_as(AccessAs<Access::ring_elements>{}, at_once, bytes);
    }
    if constexpr (C::kAdds) {
      return cudaErrorNotSupported;
    } else {
      return launch_forward<KIND, X, R, AnyCall>(p, plan, stream);
    }
  }
}

// Whether, of several heads, more is known to the compiler than of any call: short rows, as attention has them.
template <Kind KIND, typename X, typename R, typename C>
constexpr bool are_heads_known() {
  if constexpr (!C::kKnown || R::kThreads <= 0) {
    return false;
  } else {
    constexpr int most = R::kThreads * R::kVectors * kVector<X>;
    return most >= 64 && most <= 256 && (KIND == Kind::rms || C::kBias) && (sizeof(X) < 4 || !C::kRound);
  }
}

template <Kind KIND, typename X>
cudaError_t forward_of_kind(const Forward& p, cudaStream_t stream) {
  const Plan plan = make_plan(Op::forward, KIND, kDtype<X>, p.cols, current_device().max_cluster());
  return with_forward_regime<X>(plan, p.cols % kVector<X> == 0, [&](auto regime) {
    return with_call<KIND, X>(p, [&](auto call) {
      using R = decltype(regime);
      // A looped row's epilogue reads it once more anyway.
      using C = std::conditional_t<R::kVectors == kStreamed, AnyCall, decltype(call)>;
      if (p.heads.count == 1) return launch_forward<KIND, X, R, C>(p, plan, stream);
      using Heads = std::conditional_t<are_heads_known<KIND, X, R, C>(), HeadsCall<C>, AnyCall>;
      return launch_forward<KIND, X, R, Heads>(p, plan, stream);
    });
  });
}

template <typename X>
cudaError_t forward_of(const Forward& p, cudaStream_t stream) {
  return p.kind == Kind::rms ? forward_of_kind<Kind::rms, X>(p, stream) : forward_of_kind<Kind::layer, X>(p, stream);
}

}  // namespace jaxnorm::cuda
