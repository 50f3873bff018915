// From a call to the code for its dtype, with a plan that is made once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/engine/device.h"
#include "cuda/ops.h"
#include "cuda/ops/group_norm.h"
#include "cuda/ops/norms.h"

namespace jaxnorm::cuda {
namespace {

template <typename F>
cudaError_t with_dtype(Dtype dtype, F f) {
  if (dtype == Dtype::f32) return f(float{});
  return dtype == Dtype::f16 ? f(__half{}) : f(__nv_bfloat16{});
}

// `stream_dtype`: of what is normalised.
Plan forward_plan(const NormOperands& p, Dtype stream_dtype) {
  return make_plan(Way::forward, p.kind, stream_dtype, p.cols, current_device().max_cluster());
}

// An op of a sum that no one kernel does: the sum by itself, and then the op of it.
template <typename P, typename F>
cudaError_t add_and(const P& p, cudaStream_t stream, F run) {
  const cudaError_t error = add(addition_of(p), p.rows * p.cols, stream);
  return error == cudaSuccess ? run(of_sum(p)) : error;
}

}  // namespace

cudaError_t run(const NormForward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  return with_dtype(p.x.dtype,
                    [&](auto type) { return run_norm<decltype(type)>(p, forward_plan(p, p.x.dtype), stream); });
}

cudaError_t run(const AddNormForward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  const Plan plan = forward_plan(p, p.sum.dtype);
  return with_dtype(p.sum.dtype, [&](auto type) {
    using S = decltype(type);
    const cudaError_t fused = run_add_norm<S>(p, plan, stream);
    if (fused != cudaErrorNotSupported) return fused;
    return add_and(p, stream, [&](const NormForward& norm) { return run_norm<S>(norm, plan, stream); });
  });
}

cudaError_t run(const QuantizedNormForward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  const Dtype stream_dtype = p.sum ? p.sum.dtype : p.x.dtype;
  const Plan plan = forward_plan(p, stream_dtype);
  return with_dtype(stream_dtype, [&](auto type) {
    using S = decltype(type);
    const cudaError_t fused = run_quantized_norm<S>(p, plan, stream);
    if (fused != cudaErrorNotSupported) return fused;
    const auto run_apart = [&](const QuantizedNormForward& norm) {
      if (!norm.y) return run_quantized_norm<S>(norm, plan, stream);
      const cudaError_t error = run_norm<S>(norm_of(norm), plan, stream);
      return error == cudaSuccess ? run_quantized_norm<S>(without_y(norm), plan, stream) : error;
    };
    return p.sum ? add_and(p, stream, run_apart) : run_apart(p);
  });
}

cudaError_t run(const GatedNormForward& p, cudaStream_t stream) {
  if (p.cols > kGatedCols) return cudaErrorNotSupported;
  if (p.rows == 0) return cudaSuccess;
  return with_dtype(p.x.dtype, [&](auto type) { return run_gated_norm<decltype(type)>(p, stream); });
}

cudaError_t run(const GatedNormQuantizedForward& p, cudaStream_t stream) {
  if (p.cols > kGatedCols) return cudaErrorNotSupported;
  if (p.rows == 0) return cudaSuccess;
  return with_dtype(p.x.dtype, [&](auto type) { return run_gated_norm_quantized<decltype(type)>(p, stream); });
}

cudaError_t run(const GroupNormForward& p, cudaStream_t stream) {
  if (p.examples == 0) return cudaSuccess;
  const GroupPlan plan = group_plan_of(p);
  if (plan.chunks == 0) return cudaErrorMemoryAllocation;
  return with_dtype(p.x.dtype, [&](auto type) { return run_group_norm<decltype(type)>(p, plan, stream); });
}

cudaError_t run(const GroupNormBackward& p, cudaStream_t stream) {
  const GroupPlan plan = group_plan_of(p);
  if (plan.chunks == 0 && p.examples > 0) return cudaErrorMemoryAllocation;
  return with_dtype(p.x.dtype, [&](auto type) { return run_group_norm_grad<decltype(type)>(p, plan, stream); });
}

cudaError_t run(const SandwichNormForward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  const NormForward post_norm = post_norm_of(p);
  const cudaError_t fused = with_dtype(p.x.dtype, [&](auto type) {
    return run_sandwich_norm<decltype(type)>(p, forward_plan(post_norm, p.x.dtype), stream);
  });
  if (fused != cudaErrorNotSupported) return fused;
  const cudaError_t error = run(post_norm, stream);
  return error == cudaSuccess ? run(add_norm_of(p), stream) : error;
}

// Its rows are those of an RMSNorm: read once, and written.
cudaError_t run(const SoftmaxForward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  const Plan plan = make_plan(Way::forward, Kind::rms, p.x.dtype, p.cols, current_device().max_cluster());
  return with_dtype(p.x.dtype, [&](auto type) { return run_softmax<decltype(type)>(p, plan, stream); });
}

cudaError_t run(const CrossEntropyForward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  return with_dtype(p.x.dtype, [&](auto type) { return run_cross_entropy<decltype(type)>(p, stream); });
}

WorkspaceSize norm_forward_workspace(Kind kind, const WorkspaceQuery& query) {
  return {0, has_tickets(kind, query.dtype, query.cols) ? 1 : 0};
}

// Of log-softmax too.
WorkspaceSize softmax_forward_workspace(const WorkspaceQuery& query) {
  return norm_forward_workspace(Kind::rms, query);
}

// Either norm may go by tickets, the second in the addend's dtype.
WorkspaceSize sandwich_norm_forward_workspace(const WorkspaceQuery& query) {
  return {0, has_tickets(Kind::rms, query.dtype, query.cols) || has_tickets(Kind::rms, Dtype::f32, query.cols) ? 1 : 0};
}

}  // namespace jaxnorm::cuda
