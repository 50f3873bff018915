// An op out of the package's tree: y = x * rsqrt(sum(x^2) + epsilon) of each row.
#pragma once

#include <cuda_runtime_api.h>

#include "call.h"

namespace toy {

struct L2Norm {
  int64_t rows, cols;
  jaxnorm::Input x;   // f32 or bf16
  jaxnorm::Output y;  // of x's type
  float* rnorm;       // a value a row, as the gradient wants it; null where it is not wanted
  float epsilon;
};

cudaError_t run(const L2Norm& p, cudaStream_t stream);

}  // namespace toy
