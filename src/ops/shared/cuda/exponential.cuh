// Exponentials of logits.
#pragma once

#include "engine/cuda/ptx.cuh"

namespace jaxnorm::cuda {

constexpr float kLog2e = 1.44269504f;

// exp(difference), of a logit and its row's logsumexp: as they are subtracted first, the large ones are the most exact.
__device__ inline float exponential(float difference) { return exp2_estimate(difference * kLog2e); }

// The logarithm of a share of a row that has most of it: where a gradient is a difference to 1, its digits are few.
constexpr float kMostOfRow = -0.25f;

// exp(difference) - 1, of one that is above that.
__device__ inline float exponential_less_1(float difference) {
  float factor = fmaf(difference, 1.0f / 720, 1.0f / 120);
  factor = fmaf(factor, difference, 1.0f / 24);
  factor = fmaf(factor, difference, 1.0f / 6);
  factor = fmaf(factor, difference, 0.5f);
  return fmaf(factor * difference, difference, difference);
}

// What is subtracted of a row's w: its top, but of a row where none counts 0, so that no difference is NaN.
__device__ inline float origin_of(float top) { return top > -INFINITY ? top : 0.0f; }

}  // namespace jaxnorm::cuda
