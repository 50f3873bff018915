#include "cuda/ops/grad.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/engine/grad_schedule.h"
#include "cuda/ops.h"

namespace jaxnorm::cuda {

struct AnyElement;

cudaError_t run(const NormBackward& p, cudaStream_t stream) {
  if (p.x.dtype == Dtype::f32) return norm_grad_of<float>(p, stream);
  return p.x.dtype == Dtype::f16 ? norm_grad_of<__half>(p, stream) : norm_grad_of<__nv_bfloat16>(p, stream);
}

cudaError_t run(const GatedNormBackward& p, cudaStream_t stream) {
  if (p.x.dtype == Dtype::f32) return gated_norm_grad_of<float>(p, stream);
  return p.x.dtype == Dtype::f16 ? gated_norm_grad_of<__half>(p, stream) : gated_norm_grad_of<__nv_bfloat16>(p, stream);
}

cudaError_t run(const SoftmaxBackward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.dx.dtype != p.y.dtype) return softmax_grad_of<AnyElement>(p, stream);
  if (p.y.dtype == Dtype::f32) return softmax_grad_of<float>(p, stream);
  return p.y.dtype == Dtype::f16 ? softmax_grad_of<__half>(p, stream) : softmax_grad_of<__nv_bfloat16>(p, stream);
}

cudaError_t run(const LogSoftmaxBackward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.dy.dtype != p.x.dtype) return log_softmax_grad_of<AnyElement>(p, stream);
  if (p.x.dtype == Dtype::f32) return log_softmax_grad_of<float>(p, stream);
  return p.x.dtype == Dtype::f16 ? log_softmax_grad_of<__half>(p, stream)
                                 : log_softmax_grad_of<__nv_bfloat16>(p, stream);
}

// Two norms, each by its own kernels. The workspace serves one after the other.
cudaError_t run(const SandwichNormBackward& call, cudaStream_t stream) {
  SandwichNormBackward p = call;
  const int64_t elements = p.rows * p.cols;
  Output dresidual = p.dresidual;
  if (p.goes_on() && !dresidual) {
    if (p.workspace.floats < elements) return cudaErrorMemoryAllocation;
    dresidual = {p.workspace.data, p.sum.dtype};
    p.workspace = {p.workspace.data + elements, p.workspace.floats - elements};
  }
  if (dresidual || p.dscale)
    if (const cudaError_t error = run(sum_grad_of(p, dresidual), stream); error != cudaSuccess) return error;
  return p.goes_on() ? run(x_grad_of(p, dresidual), stream) : cudaSuccess;
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

WorkspaceSize sandwich_norm_backward_workspace(const WorkspaceQuery& query) {
  WorkspaceQuery one_norm = query;
  one_norm.weights = std::min(1, query.weights);
  one_norm.with_dx = true;  // as far as the sum is concerned
  WorkspaceSize size = norm_backward_workspace(one_norm);
  one_norm.dtype = Dtype::f32;  // that of the residual may be another
  const WorkspaceSize of_f32 = norm_backward_workspace(one_norm);
  size.floats = std::max(size.floats, of_f32.floats);
  size.floats_a_row = std::max(size.floats_a_row, of_f32.floats_a_row) + (query.keeps_row ? query.cols : 0);
  return size;
}

}  // namespace jaxnorm::cuda
