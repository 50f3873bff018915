// What a call runs on CUDA, and the functions for a dtype, which are compiled each in a file of its own. Nothing here
// allocates or asks the stream anything: calls may be captured into CUDA graphs.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/gated_activation/call.h"

namespace jaxnorm::cuda {

cudaError_t run(const GatedActivationForward& p, cudaStream_t stream);
cudaError_t run(const GatedActivationQuantizedForward& p, cudaStream_t stream);
cudaError_t run(const GatedActivationBackward& p, cudaStream_t stream);

template <typename X>
cudaError_t run_gated_activation(const GatedActivationForward& p, cudaStream_t stream);
template <typename X>
cudaError_t run_gated_activation_quantized(const GatedActivationQuantizedForward& p, cudaStream_t stream);
template <typename X>
cudaError_t run_gated_activation_grad(const GatedActivationBackward& p, cudaStream_t stream);

}  // namespace jaxnorm::cuda
