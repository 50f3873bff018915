// The gradients for each dtype of what was normalised, each in a file of its own so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/gated_norm.h"
#include "ops/norm.h"
#include "ops/softmax.h"

namespace jaxnorm::cuda {

template <typename X>
cudaError_t norm_grad_of(const NormBackward& p, cudaStream_t stream);
template <typename X>
cudaError_t gated_norm_grad_of(const GatedNormBackward& p, cudaStream_t stream);

// T: of all arrays; AnyElement: of each another, as far as the op allows.
template <typename T>
cudaError_t softmax_grad_of(const SoftmaxBackward& p, cudaStream_t stream);
template <typename T>
cudaError_t log_softmax_grad_of(const LogSoftmaxBackward& p, cudaStream_t stream);

}  // namespace jaxnorm::cuda
