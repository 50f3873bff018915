// The forward ops by the type S of what is normalised, each in a file of its own so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/engine/plan.h"
#include "cuda/ops.h"

namespace jaxnorm::cuda {

template <typename S>
cudaError_t run_norm(const NormForward& p, const Plan& plan, cudaStream_t stream);

// cudaErrorNotSupported: no one kernel does it.
template <typename S>
cudaError_t run_add_norm(const AddNormForward& p, const Plan& plan, cudaStream_t stream);

// cudaErrorNotSupported: of a sum, no one kernel does it.
template <typename S>
cudaError_t run_quantized_norm(const QuantizedNormForward& p, const Plan& plan, cudaStream_t stream);

// Rows of up to kGatedCols.
template <typename S>
cudaError_t run_gated_norm(const GatedNormForward& p, cudaStream_t stream);
template <typename S>
cudaError_t run_gated_norm_quantized(const GatedNormQuantizedForward& p, cudaStream_t stream);

// cudaErrorNotSupported: no one kernel does it.
template <typename X>
cudaError_t run_sandwich_norm(const SandwichNormForward& p, const Plan& plan, cudaStream_t stream);

template <typename X>
cudaError_t run_softmax(const SoftmaxForward& p, const Plan& plan, cudaStream_t stream);

template <typename X>
cudaError_t run_cross_entropy(const CrossEntropyForward& p, cudaStream_t stream);

cudaError_t add(const Addition& p, int64_t elements, cudaStream_t stream);

}  // namespace jaxnorm::cuda
