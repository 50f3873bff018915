// What a call runs on CUDA, and the functions for a dtype, which are compiled each in a file of its own. Nothing here
// allocates or asks the stream anything: calls may be captured into CUDA graphs.
#pragma once

#include <cuda_runtime_api.h>

#include "engine/cuda/plan.h"
#include "ops/norm/call.h"
#include "ops/norm/gated.h"
#include "ops/norm/quantized.h"

namespace jaxnorm::cuda {

// cudaErrorMemoryAllocation: the workspace has too little room for any way to compute the op.
cudaError_t run(const NormForward& p, cudaStream_t stream);
cudaError_t run(const ScaledAddNormForward& p, cudaStream_t stream);
cudaError_t run(const ScaledAddQuantizedNormForward& p, cudaStream_t stream);
cudaError_t run(const GatedNormForward& p, cudaStream_t stream);
cudaError_t run(const NormBackward& p, cudaStream_t stream);
cudaError_t run(const GatedNormBackward& p, cudaStream_t stream);
cudaError_t run(const ShardStatistics& p, cudaStream_t stream);
cudaError_t run(const ShardApply& p, cudaStream_t stream);

// By the type S of what is normalised.
template <typename S>
cudaError_t run_norm(const NormForward& p, const Plan& plan, cudaStream_t stream);

// cudaErrorNotSupported: no one kernel does it.
template <typename S>
cudaError_t run_add_norm(const AddNormForward& p, const Plan& plan, cudaStream_t stream);
template <typename S>
cudaError_t run_scaled_add_norm(const ScaledAddNormForward& p, const Plan& plan, cudaStream_t stream);

// cudaErrorNotSupported: of a sum, no one kernel does it.
template <typename S>
cudaError_t run_quantized_norm(const QuantizedNormForward& p, const Plan& plan, cudaStream_t stream);

// Rows of up to kGatedCols.
template <typename S>
cudaError_t run_gated_norm(const GatedNormForward& p, cudaStream_t stream);

template <typename X>
cudaError_t norm_grad_of(const NormBackward& p, cudaStream_t stream);
template <typename X>
cudaError_t gated_norm_grad_of(const GatedNormBackward& p, cudaStream_t stream);

// The plan of a norm of `stream_dtype`.
Plan forward_plan(const NormOperands& p, Dtype stream_dtype);

cudaError_t add(const Addition& p, int64_t rows, int64_t cols, cudaStream_t stream);

}  // namespace jaxnorm::cuda
