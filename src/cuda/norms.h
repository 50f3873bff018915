// What the shim calls. Nothing here allocates or asks the stream anything: calls may be captured into CUDA graphs.
#pragma once

#include <cuda_runtime_api.h>

#include "norm.h"

namespace jaxnorm::cuda {

cudaError_t backward(const Backward& p, cudaStream_t stream);

// One for each dtype of what is normalised, each in a file of its own so that they compile side by side.
template <typename X>
cudaError_t backward_of(const Backward& p, cudaStream_t stream);
template <typename X>
cudaError_t backward_gated_of(const Backward& p, cudaStream_t stream);

}  // namespace jaxnorm::cuda
