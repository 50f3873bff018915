// From a call of a norm to the code for its dtype, with a plan that is made once.
#include "engine/cuda/device.h"
#include "ops/norm/cuda/plan.h"

namespace jaxnorm::cuda {

// By the type S of what is normalised, each in a unit that is compiled for itself.
template <typename S>
cudaError_t run_norm(const NormForward& p, const Plan& plan, cudaStream_t stream);

// cudaErrorNotSupported: of a sum, no one kernel does it.
template <typename S>
cudaError_t run_add_norm(const AddNormForward& p, const Plan& plan, cudaStream_t stream);
template <typename S>
cudaError_t run_scaled_add_norm(const ScaledAddNormForward& p, const Plan& plan, cudaStream_t stream);
template <typename S>
cudaError_t run_quantized_norm(const QuantizedNormForward& p, const Plan& plan, cudaStream_t stream);

template <typename S>
cudaError_t run_gated_norm(const GatedNormForward& p, cudaStream_t stream);
template <typename X>
cudaError_t norm_grad_of(const NormBackward& p, cudaStream_t stream);
template <typename X>
cudaError_t gated_norm_grad_of(const GatedNormBackward& p, cudaStream_t stream);

namespace {

// An op of a sum that no one kernel does: the sum by itself, and then the op of it.
template <typename P, typename F>
cudaError_t add_and(const P& p, Stream stream, F run) {
  const cudaError_t error = add(addition_of(p), p.rows, p.cols, stream);
  return error == cudaSuccess ? run(of_sum(p)) : error;
}

template <typename S>
cudaError_t run_fused(const ScaledAddNormForward& p, const Plan& plan, cudaStream_t stream) {
  const bool is_plain = !p.branch_scale && p.weight_rows.count == 1;
  return is_plain ? run_add_norm<S>(p, plan, stream) : run_scaled_add_norm<S>(p, plan, stream);
}

}  // namespace

Plan forward_plan(const NormOperands& p, Dtype stream_dtype) {
  return make_forward_plan(p.kind == Kind::layer, stream_dtype, p.cols, current_device().max_cluster());
}

Outcome run(const NormForward& p, Stream stream) {
  if (p.rows == 0) return {cudaSuccess};
  return {with_dtype(p.x.dtype,
                     [&](auto type) { return run_norm<decltype(type)>(p, forward_plan(p, p.x.dtype), stream); })};
}

Outcome run(const ScaledAddNormForward& p, Stream stream) {
  if (!p.addend) return run(static_cast<const NormForward&>(p), stream);
  if (p.rows == 0) return {cudaSuccess};
  const Plan plan = forward_plan(p, p.addend.dtype);
  return {with_dtype(p.addend.dtype, [&](auto type) {
    using S = decltype(type);
    const cudaError_t fused = run_fused<S>(p, plan, stream);
    if (fused != cudaErrorNotSupported) return fused;
    return add_and(with_sum_somewhere(p), stream,
                   [&](const NormForward& norm) { return run_norm<S>(norm, plan, stream); });
  })};
}

Outcome run(const ScaledAddQuantizedNormForward& p, Stream stream) {
  if (p.rows == 0) return {cudaSuccess};
  const Dtype stream_dtype = p.sum ? p.sum.dtype : p.x.dtype;
  const Plan plan = forward_plan(p, stream_dtype);
  return {with_dtype(stream_dtype, [&](auto type) {
    using S = decltype(type);
    const cudaError_t fused = p.branch_scale ? cudaErrorNotSupported : run_quantized_norm<S>(p, plan, stream);
    if (fused != cudaErrorNotSupported) return fused;
    const auto run_apart = [&](const QuantizedNormForward& norm) {
      if (!norm.y) return run_quantized_norm<S>(norm, plan, stream);
      const cudaError_t error = run_norm<S>(norm_of(norm), plan, stream);
      return error == cudaSuccess ? run_quantized_norm<S>(without_y(norm), plan, stream) : error;
    };
    return p.sum ? add_and(p, stream, run_apart) : run_apart(p);
  })};
}

Outcome run(const GatedNormForward& p, Stream stream) {
  if (p.cols > kGatedCols) return {cudaErrorNotSupported};
  if (p.rows == 0) return {cudaSuccess};
  return {with_dtype(p.x.dtype, [&](auto type) { return run_gated_norm<decltype(type)>(p, stream); })};
}

Outcome run(const NormBackward& p, Stream stream) {
  return {with_dtype(p.x.dtype, [&](auto type) { return norm_grad_of<decltype(type)>(p, stream); })};
}

Outcome run(const GatedNormBackward& p, Stream stream) {
  return {with_dtype(p.x.dtype, [&](auto type) { return gated_norm_grad_of<decltype(type)>(p, stream); })};
}

template <Kind kind>
WorkspaceSize norm_workspace(const WorkspaceQuery& query) {
  return {0, has_tickets(kind == Kind::layer, query.dtype, query.cols) ? 1 : 0};
}
template WorkspaceSize norm_workspace<Kind::rms>(const WorkspaceQuery&);
template WorkspaceSize norm_workspace<Kind::layer>(const WorkspaceQuery&);

WorkspaceSize norm_grad_workspace(const WorkspaceQuery& query) {
  const Plan plan = make_backward_plan(query.dtype, query.cols, kMaxCluster);
  return grad_workspace(query, {plan, beside_extra_operand(plan)});
}

WorkspaceSize gated_norm_grad_workspace(const WorkspaceQuery& query) {
  WorkspaceSize size = grad_workspace(query, {make_gated_backward_plan(query.dtype, query.cols, kMaxCluster)});
  size.floats_a_row = 0;  // such rows are never in segments
  return size;
}

}  // namespace jaxnorm::cuda
