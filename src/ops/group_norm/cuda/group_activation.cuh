// The activations of GroupNorm, for results or cotangents of type Y: of z, and v times the slope at z.
#pragma once

#include "ops/group_norm/call.h"
#include "ops/shared/cuda/activation.cuh"

namespace jaxnorm::cuda {

struct Identity {
  template <typename Y>
  __device__ static float of(float z) {
    return z;
  }
  template <typename Y>
  __device__ static float sloped(float v, float) {
    return v;
  }
};

struct Relu {
  template <typename Y>
  __device__ static float of(float z) {
    return z < 0.0f ? 0.0f : z;
  }
  // Nothing passes where z is not positive, an infinity neither.
  template <typename Y>
  __device__ static float sloped(float v, float z) {
    return z > 0.0f ? v : 0.0f;
  }
};

struct Silu {
  template <typename Y>
  __device__ static float of(float z) {
    return activate<Y>(Activation::silu, z);
  }
  template <typename Y>
  __device__ static float sloped(float v, float z) {
    return v * activate_with_slope<Y>(Activation::silu, z).slope;
  }
};

// gelu(z) = z * sigmoid(w)
struct Gelu {
  static constexpr float kRoot = 1.59576912f, kCubic = 0.0713548163f;  // sqrt(8 / pi), and 0.044715 of it

  template <typename Y>
  __device__ static Sigmoid sigmoid_of(float z, float square) {
    return sigmoid<Y>(z * fmaf(square, kCubic, kRoot));
  }
  template <typename Y>
  __device__ static float of(float z) {
    return z * sigmoid_of<Y>(z, z * z).value;
  }
  template <typename Y>
  __device__ static float sloped(float v, float z) {
    const float square = z * z;
    const Sigmoid s = sigmoid_of<Y>(z, square);
    return v * fmaf(z * fmaf(square, 3.0f * kCubic, kRoot), s.value * s.complement, s.value);
  }
};

// Any of them, chosen for each element: for kernels that are not fast anyway, and take less time to compile so.
struct AnyActivation {
  PointwiseActivation activation;

  template <typename F>
  __device__ float choose(F f) const {
    switch (activation) {
      case PointwiseActivation::silu:
        return f(Silu{});
      case PointwiseActivation::relu:
        return f(Relu{});
      case PointwiseActivation::gelu:
        return f(Gelu{});
      default:
        return f(Identity{});
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
__device__ void with_activation(PointwiseActivation activation, F f) {
  if constexpr (!EACH) {
    f(AnyActivation{activation});
  } else if (activation == PointwiseActivation::silu) {
    f(Silu{});
  } else if (activation == PointwiseActivation::relu) {
    f(Relu{});
  } else if (activation == PointwiseActivation::gelu) {
    f(Gelu{});
  } else {
    f(Identity{});
  }
}

}  // namespace jaxnorm::cuda
