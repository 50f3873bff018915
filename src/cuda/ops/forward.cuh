// The forward of both norms: one pass over memory, the row in registers or shared memory between its statistics and its
// epilogue.
#pragma once

#include "cuda/norms.h"
#include "cuda/ops/forward_few.cuh"
#include "cuda/ops/forward_rows.cuh"

namespace jaxnorm::cuda {

// Of so many threads three blocks of a half type fit a multiprocessor, if each thread has 96 registers. Rows that
// vectors do not divide take more.
constexpr int kHalfTypeThreads = 192;

// Whether the scale is held as it is in memory, beside the row and nothing else.
template <typename X, typename C>
constexpr bool holds_scale() {
  if constexpr (C::kSpecialised && !C::kAdds) return std::is_same_v<typename C::Weight, X>;
  return false;
}

// How many blocks a multiprocessor shall hold: what bounds the registers, with the threads of a block.
template <Kind KIND, typename X, typename R, Access ACCESS, typename C>
struct Occupancy {
  static constexpr bool kCluster = R::kCluster > 1,
                        kPipelined = ACCESS == Access::pipelined || ACCESS == Access::pipelined_scalar;
  static constexpr bool kUnpacked = sizeof(X) == 2;  // in twice as many registers
  static constexpr bool kManyRows =
      R::kThreads > 0 && (R::kVectors * kRowsAtOnce<R, C>) == 4;  // or many of their vectors
  // With 64 registers the compiler would put off the scale's loads until the row's sums are known. Layer norm, whose
  // weights have no room in 80 either, is slower with fewer blocks.
  static constexpr bool kHoldsScale = KIND == Kind::rms && kUnpacked && R::kThreads == kWholeBlock &&
                                      R::kVectors == 4 && ACCESS == Access::vectors && holds_scale<X, C>();
  static constexpr int kRegisters = kPipelined ? 128
                                    : kUnpacked && R::kVectors == 8 && !kCluster
                                        ? (R::kMost == kHalfTypeThreads ? 96 : 128)
                                    : kManyRows || kHoldsScale ? 80
                                                               : 64;
  static constexpr int kBlocks = resident_blocks(kRegisters, R::kMost);
};

template <Kind KIND, typename X, typename R, Access ACCESS, typename C>
__global__ void __launch_bounds__(R::kMost, Occupancy<KIND, X, R, ACCESS, C>::kBlocks)
    forward_kernel(const __grid_constant__ Forward p, const __grid_constant__ RowsLaunch launch) {
  if constexpr (R::kCluster > 1 && !kHasClusters) {
    return;
  } else if constexpr (ACCESS == Access::pipelined || ACCESS == Access::pipelined_scalar) {
    forward_pipelined<KIND, X, R, ACCESS, C>(p, launch, dynamic_shared());
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
    if (divided && plan.threads_per_row <= kHalfTypeThreads) return f(Regime<kWholeBlock, 8, 1, kHalfTypeThreads>{});
  return f(Regime<kWholeBlock, 8, 1, max_forward_threads(kDtype<X>)>{});
}

// What models have is known to the compiler: weights of x's type or f32, RMS norm without a bias, layer norm rounded
// once.
template <Kind KIND, typename X, typename F>
auto with_specialisation(const Forward& p, F f) {
  constexpr bool kRms = KIND == Kind::rms;
  const auto all_are = [&](Dtype dtype) { return p.scale.dtype == dtype && (!p.bias || p.bias.dtype == dtype); };
  const bool rounds = !p.multiply_before_cast && p.y.dtype != Dtype::f32;
  if (!p.scale || p.y.dtype != kDtype<X> || (kRms ? bool{p.bias} : rounds)) return f(Generic{});
  // RMS norm's second choice is whether it rounds, which f32 never does, layer norm's whether it has a bias.
  const bool second = kRms ? rounds : bool{p.bias};
  if constexpr (!kRms || sizeof(X) < 4)
    if (all_are(kDtype<X>) && second) return f(Specialised<X, !kRms, kRms>{});
  if (all_are(kDtype<X>)) return f(Specialised<X, false, false>{});
  if constexpr (sizeof(X) < 4)
    if (all_are(Dtype::f32))
      return second ? f(Specialised<float, !kRms, kRms>{}) : f(Specialised<float, false, false>{});
  return f(Generic{});
}

template <Kind KIND, typename X>
bool is_specialised(const Forward& p) {
  return with_specialisation<KIND, X>(p, [](auto call) { return decltype(call)::kSpecialised; });
}

// With a residual, only what is aligned and known to the compiler: cudaErrorNotSupported if this is not.
template <Kind KIND, typename X, typename R, typename C>
cudaError_t launch_forward(const Forward& p, const Plan& plan, cudaStream_t stream) {
  using Y = typename C::template Result<X>;
  constexpr int N = kVector<X>;
  // Rows that are read again in each pass go one at a time.
  const int64_t thread_groups = plan.blocks_of(p.rows, kRowsAtOnce<R, C>), groups_of_one = plan.blocks_of(p.rows, 1);
  RowsLaunch launch(plan, p.cols, N, p.weight_rows);
  const auto launch_as = [&](auto access, int64_t blocks_or_clusters, int shared_bytes) {
    constexpr Access kAccess = decltype(access)::value;
    return launch_groups(forward_kernel<KIND, X, R, kAccess, typename Seen<X, kAccess, C>::Specialised>, plan,
                         blocks_or_clusters, shared_bytes, stream, p, launch);
  };
  const auto are_aligned = [](auto... arrays) { return (aligned_for<N>(arrays.dtype, arrays.data) && ...); };
  const bool divided = p.cols % N == 0 && p.cols % kVector<Y> == 0;
  const bool aligned = divided && p.y_pad % N == 0 && p.y_pad % kVector<Y> == 0 &&
                       are_aligned(p.x, p.residual, p.y, p.sum, p.scale, p.bias);
  if constexpr (!C::kSpecialised) {
    // RowMap and padding leave a row the sums that it has without them. Of half types those are of vectors anyway.
    if constexpr (sizeof(X) == 4 && R::kCluster == 1 && R::kVectors != kStreamed && R::kMost != kHalfTypeThreads)
      if ((p.weight_rows.count > 1 || p.y_pad > 0) && !divided && is_specialised<KIND, X>(p))
        return launch_as(AccessAs<Access::scalar>{}, groups_of_one, 0);
    return aligned ? launch_as(AccessAs<Access::vectors>{}, thread_groups, 0)
                   : launch_as(AccessAs<Access::elementwise>{}, groups_of_one, 0);
  } else {
    if constexpr (R::kCluster == 1) {
      // Without a residual padding is rare, and costs registers.
      if constexpr (!C::kAdds)
        if (p.y_pad > 0) return launch_forward<KIND, X, R, Generic>(p, plan, stream);
      if constexpr (kMayBeSmallBatch<R, C>)
        if (aligned && is_small_batch<R>(p)) return launch_small_batch<KIND, X, R, C>(p, plan, launch, stream);
      // With weights that may be on their way to shared memory.
      const auto launch_rows = [&](auto access) {
        using Tile = Tiling<X, R, decltype(access)::value>;
        return launch_as(access, thread_groups, plan.block_threads() * Weights<KIND, X, R, Tile, C>::kSharedBytes);
      };
      if (aligned) return launch_rows(AccessAs<Access::vectors>{});
      if constexpr (R::kMost != kHalfTypeThreads && !C::kAdds && !C::kPerHead) {
        // Whatever is aligned to less than vectors is shifted, but for f32: its vectors have fewer elements, and rows
        // that they do not divide would take longer so.
        if constexpr (sizeof(X) == 2)
          if (are_aligned(p.scale, p.bias)) return launch_rows(AccessAs<Access::unaligned>{});
        if constexpr (sizeof(X) == 4)
          if (!divided) return launch_rows(AccessAs<Access::scalar>{});
      }
    } else if (C::kAdds ? aligned && aligned_for<kVector<Y>>(p.x.dtype, p.x.data) : aligned || !divided) {
      // What comes by way of a pipeline is copied in bulk, and so aligned to 16 bytes.
      const int bytes = C::kAdds ? launch.with_pipelines(plan, p.cols, {{sizeof(Y), p.cols}, {sizeof(X), p.cols}}, 2)
                                 : launch.with_pipelines(plan, p.cols, {{sizeof(X), p.cols}}, 2);
      const int64_t at_once = std::min<int64_t>(thread_groups, current_device().groups_at_once(plan.blocks_per_row));
      launch.take_turns(at_once, p.rows);
      if (bytes > 0 && divided) {
        if constexpr (kIsDynamic<KIND, X>) {
          const cudaError_t error = launch.schedule_dynamically(at_once, p.rows, p.tickets, stream);
          if (error != cudaSuccess) return error;
        }
        return launch_as(AccessAs<Access::pipelined>{}, at_once, bytes);
      }
      if constexpr (!C::kAdds)
        if (bytes > 0) return launch_as(AccessAs<Access::pipelined_scalar>{}, at_once, bytes);
    }
    if constexpr (C::kAdds) {
      return cudaErrorNotSupported;
    } else {
      return launch_forward<KIND, X, R, Generic>(p, plan, stream);
    }
  }
}

// Whether, of several heads, more is known to the compiler than of any call: short rows, as attention has them.
template <Kind KIND, typename X, typename R, typename C>
constexpr bool is_per_head_specialised() {
  if constexpr (!C::kSpecialised || R::kThreads <= 0) {
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
    return with_specialisation<KIND, X>(p, [&](auto call) {
      using R = decltype(regime);
      // A looped row's epilogue reads it once more anyway.
      using C = std::conditional_t<R::kVectors == kStreamed, Generic, decltype(call)>;
      if (p.weight_rows.count == 1) return launch_forward<KIND, X, R, C>(p, plan, stream);
      using RowMap = std::conditional_t<is_per_head_specialised<KIND, X, R, C>(), PerHead<C>, Generic>;
      return launch_forward<KIND, X, R, RowMap>(p, plan, stream);
    });
  });
}

template <typename X>
cudaError_t forward_of(const Forward& p, cudaStream_t stream) {
  return p.kind == Kind::rms ? forward_of_kind<Kind::rms, X>(p, stream) : forward_of_kind<Kind::layer, X>(p, stream);
}

}  // namespace jaxnorm::cuda
