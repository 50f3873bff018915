// From a dtype to the code for it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "operands.h"

namespace jaxnorm::cuda {

// f with a value of the type.
template <typename F>
cudaError_t with_dtype(Dtype dtype, F f) {
  if (dtype == Dtype::f32) return f(float{});
  return dtype == Dtype::f16 ? f(__half{}) : f(__nv_bfloat16{});
}

}  // namespace jaxnorm::cuda
