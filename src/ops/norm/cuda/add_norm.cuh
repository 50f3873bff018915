// The forward of x + addend in one kernel, where what models have is known to the compiler: y is of x's type, which
// is the addend's or, of an f32 addend, a half type; RMSNorm without a bias, LayerNorm with one and rounded once.
#pragma once

#include "ops/norm/cuda/norm.cuh"

namespace jaxnorm::cuda {

// Calls f with the weights of a call that is known.
template <typename STATS, typename X, typename F>
cudaError_t with_known_weights(const NormForward& p, F f) {
  constexpr bool kCentred = STATS::kCentred;
  const bool rounds = !p.multiply_before_cast && sizeof(X) < 4;
  if (!p.scale || bool{p.bias} != kCentred || p.y.dtype != kDtype<X> || (kCentred && rounds))
    return cudaErrorNotSupported;
  const auto all_are = [&](Dtype dtype) { return p.scale.dtype == dtype && (!kCentred || p.bias.dtype == dtype); };
  const auto with_type = [&](auto element) {
    using T = decltype(element);
    if constexpr (!kCentred && sizeof(X) < 4)
      if (rounds) return f(Weights<T, false, true>{});
    return f(Weights<T, kCentred, false>{});
  };
  if (all_are(Dtype::f32)) return with_type(float{});
  if constexpr (sizeof(X) < 4)
    if (all_are(kDtype<X>)) return with_type(X{});
  return cudaErrorNotSupported;
}

// A call with known weights in a regime.
template <typename STATS, typename S, typename X, typename R, typename W>
cudaError_t launch_add_norm(const AddNormForward& p, const Plan& plan, cudaStream_t stream) {
  constexpr int N = kVector<S>, kLarger = kVector<X> > N ? kVector<X> : N;
  RowsLaunch launch(plan, p.cols, N, p.weight_rows);
  launch.own.y_pad = p.y_stride - p.cols;
  const bool is_aligned =
      p.cols % kLarger == 0 && p.y_stride % kLarger == 0 && are_aligned<N>(p.x, p.addend, p.y, p.sum, p.scale, p.bias);
  if constexpr (R::kCluster == 1) {
    if (!is_aligned) return cudaErrorNotSupported;
    return RowLauncher<NormOp<STATS, S, X, W, true>, R>{p, plan, launch, stream}.template direct<Access::vectors>();
  } else {
    // What comes by way of a pipeline is copied in bulk, and so aligned to 16 bytes.
    if (!is_aligned || !are_aligned<kVector<X>>(p.x)) return cudaErrorNotSupported;
    using Op = NormOp<STATS, S, X, typename W::template Floats<S>, true>;
    return RowLauncher<Op, R>{p, plan, launch, stream}.template pipelined<Access::pipelined>(p.workspace);
  }
}

template <typename S, typename X>
cudaError_t add_norm_as(const AddNormForward& p, const Plan& plan, cudaStream_t stream) {
  if (p.weight_rows.count > 1) return cudaErrorNotSupported;
  return with_stats(p.kind, [&](auto stats) {
    using STATS = decltype(stats);
    return with_regime<ForwardRegimes<sizeof(S)>>(plan, [&](auto regime) {
      using R = decltype(regime);
      if constexpr (R::kVectors == kStreamed) {
        return cudaErrorNotSupported;
      } else {
        return with_known_weights<STATS, X>(
            p, [&](auto weights) { return launch_add_norm<STATS, S, X, R, decltype(weights)>(p, plan, stream); });
      }
    });
  });
}

template <typename S>
cudaError_t run_add_norm(const AddNormForward& p, const Plan& plan, cudaStream_t stream) {
  if (p.x.dtype == kDtype<S>) return add_norm_as<S, S>(p, plan, stream);
  if constexpr (std::is_same_v<S, float>) {
    return p.x.dtype == Dtype::f16 ? add_norm_as<S, __half>(p, plan, stream)
                                   : add_norm_as<S, __nv_bfloat16>(p, plan, stream);
  } else {
    return cudaErrorNotSupported;
  }
}

}  // namespace jaxnorm::cuda
