// What the shim calls. Nothing here allocates or asks the stream anything: calls may be captured into CUDA graphs.
#pragma once

#include <cuda_runtime_api.h>

#include "norm.h"

namespace jaxnorm::cuda {

cudaError_t forward(const Forward& p, cudaStream_t stream);

cudaError_t shard_statistics(const ShardStatistics& p, cudaStream_t stream);
cudaError_t shard_apply(const ShardApply& p, cudaStream_t stream);

// sum = x + residual of a forward, alone.
cudaError_t add(const Forward& p, cudaStream_t stream);

// One for each dtype of what is normalised, each in a file of its own so that they compile side by side.
template <typename X>
cudaError_t forward_of(const Forward& p, cudaStream_t stream);
// With a residual. cudaErrorNotSupported: no one kernel does it.
template <typename X>
cudaError_t forward_added_of(const Forward& p, cudaStream_t stream);
// With a quantised result. cudaErrorNotSupported: with a residual, no one kernel does it.
template <typename X>
cudaError_t forward_quantized_of(const Forward& p, cudaStream_t stream);
// With a gate: rows of up to 16384 columns.
template <typename X>
cudaError_t forward_gated_of(const Forward& p, cudaStream_t stream);

}  // namespace jaxnorm::cuda
