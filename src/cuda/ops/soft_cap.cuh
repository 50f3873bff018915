// tanh, of which soft caps are made.
#pragma once

#include "cuda/engine/vector.cuh"

namespace jaxnorm::cuda {

// To about two units in the last place. Of the bounds it is 1 and -1.
__device__ inline float tanh_of(float v) {
  constexpr float twice_log2_e = 2.88539008f;
  const float size = fabsf(v), square = v * v;
  // Small values by a polynomial, as those would cancel in the other formula: tanh(v) = v + v^3 P(v^2) up to 0.55.
  const float slope =
      fmaf(fmaf(fmaf(0.0165143963f, square, -0.0527393855f), square, 0.133224085f), square, -0.333330661f);
  const float small = fmaf(v * square, slope, v);
  const float large = fmaf(-2.0f, reciprocal_estimate(1.0f + exp2_estimate(size * twice_log2_e)), 1.0f);
  return size < 0.55f ? small : copysignf(large, v);
}

}  // namespace jaxnorm::cuda
