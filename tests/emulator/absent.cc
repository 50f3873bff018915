// The kernels of f16: the same code as for bf16, not compiled here, to save time.
#include <cstdlib>

#include "cuda/norms.h"
#include "cuda/ops/grad.h"

namespace jaxnorm::cuda {

template <>
cudaError_t forward_of<__half>(const Forward&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t forward_added_of<__half>(const Forward&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t forward_quantized_of<__half>(const Forward&, cudaStream_t) {
  std::abort();
}
template <>
cudaError_t forward_gated_of<__half>(const Forward&, cudaStream_t) {
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

}  // namespace jaxnorm::cuda
