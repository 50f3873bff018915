// What a call runs on CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "ops/quantized_dot/call.h"

namespace jaxnorm::cuda {

// Why it was not launched, since more than CUDA may refuse it; empty where it was.
std::string run(const QuantizedDot& p, cudaStream_t stream);

}  // namespace jaxnorm::cuda
