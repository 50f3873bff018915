// What a call runs on CUDA, and the functions for a dtype, which are compiled each in a file of its own. Nothing here
// allocates or asks the stream anything: calls may be captured into CUDA graphs.
#pragma once

#include <cuda_runtime_api.h>

#include "engine/cuda/plan.h"
#include "ops/softmax/call.h"

namespace jaxnorm::cuda {

cudaError_t run(const SoftmaxForward& p, cudaStream_t stream);
cudaError_t run(const SoftmaxBackward& p, cudaStream_t stream);
cudaError_t run(const LogSoftmaxBackward& p, cudaStream_t stream);

template <typename X>
cudaError_t run_softmax(const SoftmaxForward& p, const Plan& plan, cudaStream_t stream);

// T: of all arrays; AnyElement: of each another, as far as the op allows.
template <typename T>
cudaError_t softmax_grad_of(const SoftmaxBackward& p, cudaStream_t stream);
template <typename T>
cudaError_t log_softmax_grad_of(const LogSoftmaxBackward& p, cudaStream_t stream);

}  // namespace jaxnorm::cuda
