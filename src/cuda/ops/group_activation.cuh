// The activations of GroupNorm, for results or cotangents of type Y.
#pragma once

#include "cuda/ops/activation.cuh"
#include "ops/group_norm.h"

namespace jaxnorm::cuda {

// gelu(z) = z * sigmoid(w)
struct GeluArgument {
  float w, slope;

  __device__ explicit GeluArgument(float z) {
    constexpr float root = 1.59576912f, cubic = 0.0713548163f;  // sqrt(8 / pi), and 0.044715 of it
    const float square = z * z;
    w = z * fmaf(square, cubic, root);
    slope = fmaf(square, 3.0f * cubic, root);
  }
};

template <typename Y>
__device__ float activate(PointwiseActivation activation, float z) {
  switch (activation) {
    case PointwiseActivation::silu:
      return activate<Y>(Activation::silu, z);
    case PointwiseActivation::relu:
      return z < 0.0f ? 0.0f : z;
    case PointwiseActivation::gelu:
      return z * sigmoid<Y>(GeluArgument(z).w).value;
    default:
      return z;
  }
}

template <typename Y>
__device__ float slope(PointwiseActivation activation, float z) {
  switch (activation) {
    case PointwiseActivation::silu:
      return activate_with_slope<Y>(Activation::silu, z).slope;
    case PointwiseActivation::relu:
      return z > 0.0f ? 1.0f : 0.0f;
    case PointwiseActivation::gelu: {
      const GeluArgument argument(z);
      const Sigmoid s = sigmoid<Y>(argument.w);
      return fmaf(z * argument.slope, s.value * s.complement, s.value);
    }
    default:
      return 1.0f;
  }
}

}  // namespace jaxnorm::cuda
