// The kernels of f16 that have a file of their own: the same code as for bf16, not compiled here, to save time.
#include <cstdlib>

#include "ops/norm/cuda.h"

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
cudaError_t run_scaled_add_norm<__half>(const ScaledAddNormForward&, const Plan&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t run_quantized_norm<__half>(const QuantizedNormForward&, const Plan&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t norm_grad_of<__half>(const NormBackward&, cudaStream_t) {
  std::abort();
}

}  // namespace jaxnorm::cuda
