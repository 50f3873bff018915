#include "cuda/ops/grad.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/engine/grad_schedule.h"
#include "cuda/ops.h"

namespace jaxnorm::cuda {

cudaError_t run(const NormBackward& p, cudaStream_t stream) {
  if (p.x.dtype == Dtype::f32) return norm_grad_of<float>(p, stream);
  return p.x.dtype == Dtype::f16 ? norm_grad_of<__half>(p, stream) : norm_grad_of<__nv_bfloat16>(p, stream);
}

cudaError_t run(const GatedNormBackward& p, cudaStream_t stream) {
  if (p.x.dtype == Dtype::f32) return gated_norm_grad_of<float>(p, stream);
  return p.x.dtype == Dtype::f16 ? gated_norm_grad_of<__half>(p, stream) : gated_norm_grad_of<__nv_bfloat16>(p, stream);
}

WorkspaceSize norm_backward_workspace(const WorkspaceQuery& query) {
  const Plan plan = make_plan(Op::backward, Kind::rms, query.dtype, query.cols, kMaxCluster);
  return grad_workspace(query, {plan, beside_extra_operand(plan)});
}

WorkspaceSize gated_norm_backward_workspace(const WorkspaceQuery& query) {
  WorkspaceSize size = grad_workspace(query, {make_gated_backward_plan(query.dtype, query.cols, kMaxCluster)});
  size.floats_a_row = 0;  // such rows are never in segments
  return size;
}

}  // namespace jaxnorm::cuda
