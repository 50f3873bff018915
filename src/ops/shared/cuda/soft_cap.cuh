// Soft caps of logits: z = cap * tanh(x * scale / cap).
#pragma once

#include "engine/cuda/vector.cuh"

namespace jaxnorm::cuda {

struct Tanh {
  float value, complement;  // which is 1 - value²
};

// tanh(v) for values of X: of f32 to about two units in the last place, and of half types, whose rounding hides the
// rest, to as many of 1.
template <typename X>
__device__ Tanh tanh_of(float v) {
  // tanh(|v|) = 1 - 2 * rest, where rest = 1 / (1 + exp(2 |v|)): exact where it is large.
  const float rest = reciprocal_estimate(1.0f + exp2_estimate(fabsf(v) * 2.88539008f));
  Tanh result{copysignf(fmaf(-2.0f, rest, 1.0f), v), 4.0f * rest * (1.0f - rest)};
  if constexpr (sizeof(X) == 4) {
    // And where it is small, as a polynomial for |v| < 0.55.
    const float square = v * v;
    float slope = fmaf(square, 1.57394409e-2f, -5.23025943e-2f);
    slope = fmaf(slope, square, 1.33152977e-1f);
    slope = fmaf(slope, square, -3.33327681e-1f);
    const float small = fmaf(slope * square, v, v);
    if (fabsf(v) < 0.55f) result = {small, fmaf(-small, small, 1.0f)};
  }
  return result;
}

}  // namespace jaxnorm::cuda
