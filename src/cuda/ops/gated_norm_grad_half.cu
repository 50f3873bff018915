#include "cuda/ops/gated_norm_grad.cuh"

namespace jaxnorm::cuda {
template cudaError_t gated_norm_grad_of<__half>(const GatedNormBackward&, cudaStream_t);
template cudaError_t gated_norm_grad_of<__nv_bfloat16>(const GatedNormBackward&, cudaStream_t);
}  // namespace jaxnorm::cuda
