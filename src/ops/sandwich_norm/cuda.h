// What a call runs on CUDA, and the functions for a dtype, which are compiled each in a file of its own. Nothing here
// allocates or asks the stream anything: calls may be captured into CUDA graphs.
#pragma once

#include <cuda_runtime_api.h>

#include "engine/cuda/plan.h"
#include "ops/sandwich_norm/call.h"

namespace jaxnorm::cuda {

// cudaErrorMemoryAllocation: the workspace has too little room for any way to compute the op.
cudaError_t run(const SandwichNormForward& p, cudaStream_t stream);
cudaError_t run(const SandwichNormBackward& p, cudaStream_t stream);

// cudaErrorNotSupported: no one kernel does it.
template <typename X>
cudaError_t run_sandwich_norm(const SandwichNormForward& p, const Plan& plan, cudaStream_t stream);

}  // namespace jaxnorm::cuda
