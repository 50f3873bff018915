// Exponentials of logits.
#pragma once

#include "cuda/engine/ptx.cuh"

namespace jaxnorm::cuda {

// exp(difference), of a logit and its row's logsumexp: as they are subtracted first, the large ones are the most exact.
__device__ inline float exponential(float difference) { return exp2_estimate(difference * 1.44269504f); }

}  // namespace jaxnorm::cuda
