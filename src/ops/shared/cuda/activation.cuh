// Activations, two instructions of the special function unit each.
#pragma once

#include "cuda/engine/vector.cuh"
#include "ops/norm/gated.h"

namespace jaxnorm::cuda {

struct Sigmoid {
  float value, complement;  // which is 1 - value
};

// sigmoid(v) = 1 / (1 + exp(-v)) for values of X: to about two units in the last place of f32, and of half types, whose
// rounding hides the rest, as the estimates give it. What would be below 2^-126 is 0.
template <typename X>
__device__ Sigmoid sigmoid(float v) {
  constexpr float log2_e = 1.44269504f;
  if constexpr (sizeof(X) < 4) {
    const float value = reciprocal_estimate(1.0f + exp2_estimate(v * -log2_e));
    return {value, 1.0f - value};
  } else {
    // Of the bounds it is 0 and 1, and their exponentials are finite.
    const float bounded = v < -88.0f ? -88.0f : v > 128.0f ? 128.0f : v;
    const float exponent = bounded * -log2_e;
    // What rounding took from the exponent, as a power of e. ln(2) in two parts.
    const float rest = fmaf(exponent, -1.90465429e-9f, fmaf(exponent, 0.693147182f, bounded));
    const float estimate = exp2_estimate(exponent), exponential = fmaf(estimate, -rest, estimate);
    const float value = reciprocal(1.0f + exponential);
    return {value, exponential * value};
  }
}

template <typename X>
__device__ float activate(Activation activation, float v) {
  const float value = sigmoid<X>(v).value;
  return activation == Activation::silu ? v * value : value;
}

// activation(v) and its derivative.
struct Activated {
  float value, slope;
};

template <typename X>
__device__ Activated activate_with_slope(Activation activation, float v) {
  const Sigmoid s = sigmoid<X>(v);
  const bool silu = activation == Activation::silu;
  const float value = silu ? v * s.value : s.value;
  return {value, fmaf(value, s.complement, silu ? s.value : 0.0f)};
}

}  // namespace jaxnorm::cuda
