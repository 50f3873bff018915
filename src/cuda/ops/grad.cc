#include "cuda/ops/grad.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/engine/grad_schedule.h"
#include "cuda/ops.h"
#include "cuda/ops/norms.h"

namespace jaxnorm::cuda {
namespace {

// Whether rows of f32 may have sums of another order beside a dy of a half type: those that vectors do not divide and
// those in segments go by other kernels then.
bool depends_on_dtype_of_dy(int64_t cols) {
  return cols % vector_of(Dtype::f32) != 0 ||
         make_plan(Way::backward, Kind::rms, Dtype::f32, cols, kMaxCluster).segments > 0;
}

// Whether daddend is widened to x's type before the first norm's gradient reads it: as two norms one after the other
// hand it on, so that dx has the bits that they give. A program of an older build has no room for that.
bool widens(const SandwichNormBackward& p) {
  if (!p.goes_on() || p.rows == 0 || p.x.dtype != Dtype::f32 || p.sum.dtype == Dtype::f32) return false;
  if (!depends_on_dtype_of_dy(p.cols)) return false;
  const int weights = bool{p.dpost_scale} + bool{p.dscale};
  const WorkspaceSize wanted =
      sandwich_norm_backward_workspace({p.x.dtype, p.cols, weights, {}, true, !p.daddend, true});
  return p.workspace.floats >= p.rows * wanted.floats_a_row + wanted.floats;
}

}  // namespace

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
  const auto keep = [&](Dtype dtype) -> Output {
    float* const rows = p.workspace.data;
    p.workspace = {rows + elements, p.workspace.floats - elements};
    return {rows, dtype};
  };
  const bool is_widened = widens(p);
  Output daddend = p.daddend;
  if (p.goes_on() && !daddend) {
    if (p.workspace.floats < elements) return cudaErrorMemoryAllocation;
    daddend = keep(p.sum.dtype);
  }
  const Output received = is_widened ? keep(p.x.dtype) : daddend;
  if (daddend || p.dscale)
    if (const cudaError_t error = run(sum_grad_of(p, daddend), stream); error != cudaSuccess) return error;
  if (!p.goes_on()) return cudaSuccess;
  if (is_widened)
    if (const cudaError_t error = add({{daddend.data, daddend.dtype}, {}, received}, elements, stream);
        error != cudaSuccess)
      return error;
  return run(x_grad_of(p, received), stream);
}

WorkspaceSize norm_backward_workspace(const WorkspaceQuery& query) {
  const Plan plan = make_plan(Way::backward, Kind::rms, query.dtype, query.cols, kMaxCluster);
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
  one_norm.dtype = Dtype::f32;  // that of the addend may be another
  const WorkspaceSize of_f32 = norm_backward_workspace(one_norm);
  size.floats = std::max(size.floats, of_f32.floats);
  const int rows_kept = query.keeps_row + (query.widens_row && depends_on_dtype_of_dy(query.cols));
  size.floats_a_row = std::max(size.floats_a_row, of_f32.floats_a_row) + rows_kept * query.cols;
  return size;
}

}  // namespace jaxnorm::cuda
