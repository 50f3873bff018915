// The kernels of f16: the same code as for bf16, not compiled here, to save time.
#include <cstdlib>

#include "cuda/ops.h"
#include "cuda/ops/grad.h"
#include "cuda/ops/group_norm.h"
#include "cuda/ops/norms.h"
#include "cuda/ops/rotary_plan.h"

namespace jaxnorm::cuda {

template <>
cudaError_t run_norm<__half>(const NormForward&, const Plan&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t run_add_norm<__half>(const AddNormForward&, const Plan&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t run_quantized_norm<__half>(const QuantizedNormForward&, const Plan&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t run_gated_norm<__half>(const GatedNormForward&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t run_gated_norm_quantized<__half>(const GatedNormQuantizedForward&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t run_sandwich_norm<__half>(const SandwichNormForward&, const Plan&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t norm_grad_of<__half>(const NormBackward&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t gated_norm_grad_of<__half>(const GatedNormBackward&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t run_softmax<__half>(const SoftmaxForward&, const Plan&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t run_cross_entropy<__half>(const CrossEntropyForward&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t softmax_grad_of<__half>(const SoftmaxBackward&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t log_softmax_grad_of<__half>(const LogSoftmaxBackward&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t run_group_norm<__half>(const GroupNormForward&, const GroupPlan&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t run_group_norm_grad<__half>(const GroupNormBackward&, const GroupPlan&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t run_qk_norm_rotary<__half>(const QkNormRotaryForward&, bool, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t run_qk_norm_rotary_grad<__half>(const QkNormRotaryBackward&, cudaStream_t) {
  std::abort();
}

}  // namespace jaxnorm::cuda
