// The gradient of the L2 norm: with y = x * rnorm, rnorm = 1 / |x|,
//   dx = rnorm * (dy - y * sum(dy * y))
#pragma once

#include <cuda_runtime_api.h>

#include "call.h"

namespace toy {

struct L2NormGrad {
  int64_t rows, cols;
  jaxnorm::Input dy, x;  // of one type
  const float* rnorm;    // a value a row
  jaxnorm::Output dx;
};

cudaError_t run(const L2NormGrad& p, cudaStream_t stream);

}  // namespace toy
