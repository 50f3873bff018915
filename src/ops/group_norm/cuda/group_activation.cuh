// The activations of GroupNorm, for results or cotangents of type Y: of z, and v times the slope at z.
#pragma once

#include "ops/group_norm/call.h"
#include "ops/shared/cuda/activation.cuh"

namespace jaxnorm::cuda {

// One of them as a type.
template <typename A>
struct OneActivation {
  template <typename Y>
  __device__ static float of(float z) {
    return A::template of<Y>(z);
  }
  template <typename Y>
  __device__ static float sloped(float v, float z) {
    return cuda::sloped<A, Y>(v, z);
  }
};

// Any of them, chosen for each element: for kernels that are not fast anyway, and take less time to compile so.
struct AnyActivation {
  Activation activation;

  template <typename F>
  __device__ float choose(F f) const {
    switch (activation) {
      case Activation::silu:
        return f(OneActivation<Silu>{});
      case Activation::relu:
        return f(OneActivation<Relu>{});
      case Activation::gelu:
        return f(OneActivation<Gelu>{});
      default:
        return f(OneActivation<Identity>{});
    }
  }
  template <typename Y>
  __device__ float of(float z) const {
    return choose([&](auto each) { return each.template of<Y>(z); });
  }
  template <typename Y>
  __device__ float sloped(float v, float z) const {
    return choose([&](auto each) { return each.template sloped<Y>(v, z); });
  }
};

// Calls f with the activation. EACH: as a type of its own, once for a loop, as a choice for each element keeps the
// compiler from computing several at once.
template <bool EACH, typename F>
__device__ void with_activation(Activation activation, F f) {
  if constexpr (!EACH) {
    f(AnyActivation{activation});
  } else if (activation == Activation::silu) {
    f(OneActivation<Silu>{});
  } else if (activation == Activation::relu) {
    f(OneActivation<Relu>{});
  } else if (activation == Activation::gelu) {
    f(OneActivation<Gelu>{});
  } else {
    f(OneActivation<Identity>{});
  }
}

}  // namespace jaxnorm::cuda
