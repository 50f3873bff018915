// From a call of the sandwich norm to the code for its dtype.
#include <algorithm>

#include "engine/cuda/device.h"
#include "ops/norm/cuda/plan.h"
#include "ops/sandwich_norm/call.h"

namespace jaxnorm::cuda {

// Compiled in a unit of its own. cudaErrorNotSupported: no one kernel does it.
template <typename X>
cudaError_t run_sandwich_norm(const SandwichNormForward& p, const Plan& plan, cudaStream_t stream);

namespace {

// Whether rows of f32 may have sums of another order beside a dy of a half type: those that vectors do not divide go by
// other kernels then, and those in segments by other blocks.
bool depends_on_dtype_of_dy(int64_t cols) {
  return cols % vector_of(Dtype::f32) != 0 || make_backward_plan(Dtype::f32, cols, kMaxCluster).segments > 0;
}

// Whether daddend is widened to x's type before the first norm's gradient reads it: as two norms one after the other
// hand it on, so that dx has the bits that they give. A program of an older build has no room for that.
bool widens(const SandwichNormBackward& p) {
  if (!p.goes_on() || p.rows == 0 || p.x.dtype != Dtype::f32 || p.sum.dtype == Dtype::f32) return false;
  if (!depends_on_dtype_of_dy(p.cols)) return false;
  const int weights = bool{p.dpost_scale} + bool{p.dscale};
  const WorkspaceSize wanted = sandwich_norm_grad_workspace({p.x.dtype, p.cols, weights, {}, true, !p.daddend, true});
  return p.workspace.floats >= p.rows * wanted.floats_a_row + wanted.floats;
}

}  // namespace

Outcome run(const SandwichNormForward& p, Stream stream) {
  if (p.rows == 0) return {cudaSuccess};
  const NormForward post_norm = post_norm_of(p);
  const cudaError_t fused = with_dtype(p.x.dtype, [&](auto type) {
    return run_sandwich_norm<decltype(type)>(p, forward_plan(post_norm, p.x.dtype), stream);
  });
  if (fused != cudaErrorNotSupported) return {fused};
  const Outcome outcome = run(post_norm, stream);
  return outcome == cudaSuccess ? run(add_norm_of(p), stream) : outcome;
}

// Two norms, each by its own kernels. The workspace serves one after the other.
Outcome run(const SandwichNormBackward& call, Stream stream) {
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
    if (p.workspace.floats < elements) return {cudaErrorMemoryAllocation};
    daddend = keep(p.sum.dtype);
  }
  const Output received = is_widened ? keep(p.x.dtype) : daddend;
  if (daddend || p.dscale)
    if (const Outcome outcome = run(sum_grad_of(p, daddend), stream); outcome != cudaSuccess) return outcome;
  if (!p.goes_on()) return {cudaSuccess};
  if (is_widened)
    if (const Outcome outcome = add({{daddend.data, daddend.dtype}, {}, received}, p.rows, p.cols, stream);
        outcome != cudaSuccess)
      return outcome;
  return run(x_grad_of(p, received), stream);
}

// Either norm may go by tickets, the second in the addend's dtype.
WorkspaceSize sandwich_norm_workspace(const WorkspaceQuery& query) {
  return {0, has_tickets(false, query.dtype, query.cols) || has_tickets(false, Dtype::f32, query.cols) ? 1 : 0};
}

WorkspaceSize sandwich_norm_grad_workspace(const WorkspaceQuery& query) {
  WorkspaceQuery one_norm = query;
  one_norm.weights = std::min(1, query.weights);
  one_norm.with_dx = true;  // as far as the sum is concerned
  WorkspaceSize size = norm_grad_workspace(one_norm);
  one_norm.dtype = Dtype::f32;  // that of the addend may be another
  const WorkspaceSize of_f32 = norm_grad_workspace(one_norm);
  size.floats = std::max(size.floats, of_f32.floats);
  const int rows_kept = query.keeps_row + (query.widens_row && depends_on_dtype_of_dy(query.cols));
  size.floats_a_row = std::max(size.floats_a_row, of_f32.floats_a_row) + rows_kept * query.cols;
  return size;
}

}  // namespace jaxnorm::cuda
