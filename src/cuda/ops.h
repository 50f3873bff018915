// What the shim calls: each op, and how large a workspace it wants. Nothing here allocates or asks the stream anything:
// calls may be captured into CUDA graphs.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "ops/add_norm.h"
#include "ops/cross_entropy.h"
#include "ops/gated_norm.h"
#include "ops/gated_norm_quantized.h"
#include "ops/group_norm.h"
#include "ops/norm_shard.h"
#include "ops/qk_norm_rotary.h"
#include "ops/quantized_dot.h"
#include "ops/quantized_norm.h"
#include "ops/sandwich_norm.h"
#include "ops/softmax.h"

namespace jaxnorm::cuda {

// cudaErrorMemoryAllocation: the workspace has too little room for any way to compute the op.
cudaError_t run(const NormForward& p, cudaStream_t stream);
cudaError_t run(const AddNormForward& p, cudaStream_t stream);
cudaError_t run(const QuantizedNormForward& p, cudaStream_t stream);
cudaError_t run(const GatedNormForward& p, cudaStream_t stream);
cudaError_t run(const GatedNormQuantizedForward& p, cudaStream_t stream);
cudaError_t run(const GroupNormForward& p, cudaStream_t stream);
cudaError_t run(const SandwichNormForward& p, cudaStream_t stream);
cudaError_t run(const NormBackward& p, cudaStream_t stream);
cudaError_t run(const GatedNormBackward& p, cudaStream_t stream);
cudaError_t run(const GroupNormBackward& p, cudaStream_t stream);
cudaError_t run(const SandwichNormBackward& p, cudaStream_t stream);
cudaError_t run(const QkNormRotaryForward& p, cudaStream_t stream);
cudaError_t run(const QkNormRotaryBackward& p, cudaStream_t stream);
cudaError_t run(const SoftmaxForward& p, cudaStream_t stream);
cudaError_t run(const SoftmaxBackward& p, cudaStream_t stream);
cudaError_t run(const LogSoftmaxBackward& p, cudaStream_t stream);
cudaError_t run(const CrossEntropyForward& p, cudaStream_t stream);
cudaError_t run(const CrossEntropyBackward& p, cudaStream_t stream);
cudaError_t run(const ShardStatistics& p, cudaStream_t stream);
cudaError_t run(const ShardApply& p, cudaStream_t stream);
// Why it was not launched, since more than CUDA may refuse it; empty where it was.
std::string run(const QuantizedDot& p, cudaStream_t stream);

// Ops without a workspace have none of these.
WorkspaceSize norm_forward_workspace(Kind kind, const WorkspaceQuery& query);
WorkspaceSize norm_backward_workspace(const WorkspaceQuery& query);
WorkspaceSize gated_norm_backward_workspace(const WorkspaceQuery& query);
WorkspaceSize sandwich_norm_forward_workspace(const WorkspaceQuery& query);
WorkspaceSize sandwich_norm_backward_workspace(const WorkspaceQuery& query);
WorkspaceSize qk_norm_rotary_backward_workspace(const WorkspaceQuery& query);
WorkspaceSize softmax_forward_workspace(const WorkspaceQuery& query);
// Of a row of `query`, a group of an example: weight_rows are the groups of an example, and the channels of each.
WorkspaceSize group_norm_forward_workspace(const WorkspaceQuery& query);
WorkspaceSize group_norm_backward_workspace(const WorkspaceQuery& query);
// The same for all shapes.
WorkspaceSize quantized_dot_workspace(const WorkspaceQuery& query);

}  // namespace jaxnorm::cuda
