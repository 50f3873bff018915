// What a call runs on CUDA, and the functions for a dtype, which are compiled each in a file of its own. Nothing here
// allocates or asks the stream anything: calls may be captured into CUDA graphs.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cross_entropy/call.h"

namespace jaxnorm::cuda {

cudaError_t run(const CrossEntropyForward& p, cudaStream_t stream);
cudaError_t run(const CrossEntropyBackward& p, cudaStream_t stream);

template <typename X>
cudaError_t run_cross_entropy(const CrossEntropyForward& p, cudaStream_t stream);

}  // namespace jaxnorm::cuda
