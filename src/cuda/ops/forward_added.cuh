// The forward of x + residual in one kernel, where what models have is known to the compiler: y is of x's type, which
// is the residual's or, of an f32 residual, a half type; RMS norm without a bias, layer norm with one and rounded once.
#pragma once

#include "cuda/ops/forward.cuh"

namespace jaxnorm::cuda {

template <Kind KIND, typename X, typename ADDED, typename F>
cudaError_t with_added_specialisation(const Forward& p, F f) {
  constexpr bool kLayer = KIND == Kind::layer;
  const bool rounds = !p.multiply_before_cast && sizeof(ADDED) < 4;
  if (!p.scale || bool{p.bias} != kLayer || p.y.dtype != kDtype<ADDED> || (kLayer && rounds))
    return cudaErrorNotSupported;
  const auto all_are = [&](Dtype dtype) { return p.scale.dtype == dtype && (!kLayer || p.bias.dtype == dtype); };
  const auto of_weights = [&](auto type) {
    using T = decltype(type);
    if constexpr (!kLayer && sizeof(ADDED) < 4)
      if (rounds) return f(Specialised<T, false, true, ADDED>{});
    return f(Specialised<T, kLayer, false, ADDED>{});
  };
  if (all_are(Dtype::f32)) return of_weights(float{});
  if constexpr (sizeof(ADDED) < 4)
    if (all_are(kDtype<ADDED>)) return of_weights(ADDED{});
  return cudaErrorNotSupported;
}

template <Kind KIND, typename X, typename ADDED>
cudaError_t forward_added_of_kind(const Forward& p, cudaStream_t stream) {
  if (p.weight_rows.count > 1) return cudaErrorNotSupported;
  const Plan plan = make_plan(Op::forward, KIND, kDtype<X>, p.cols, current_device().max_cluster());
  return with_forward_regime<X>(plan, p.cols % kVector<X> == 0, [&](auto regime) {
    using R = decltype(regime);
    if constexpr (R::kVectors == kStreamed) {
      return cudaErrorNotSupported;
    } else {
      return with_added_specialisation<KIND, X, ADDED>(
          p, [&](auto call) { return launch_forward<KIND, X, R, decltype(call)>(p, plan, stream); });
    }
  });
}

template <typename X, typename ADDED>
cudaError_t forward_added_as(const Forward& p, cudaStream_t stream) {
  return p.kind == Kind::rms ? forward_added_of_kind<Kind::rms, X, ADDED>(p, stream)
                             : forward_added_of_kind<Kind::layer, X, ADDED>(p, stream);
}

template <typename X>
cudaError_t forward_added_of(const Forward& p, cudaStream_t stream) {
  if (p.x.dtype == kDtype<X>) return forward_added_as<X, X>(p, stream);
  if constexpr (std::is_same_v<X, float>) {
    return p.x.dtype == Dtype::f16 ? forward_added_as<X, __half>(p, stream)
                                   : forward_added_as<X, __nv_bfloat16>(p, stream);
  } else {
    return cudaErrorNotSupported;
  }
}

}  // namespace jaxnorm::cuda
