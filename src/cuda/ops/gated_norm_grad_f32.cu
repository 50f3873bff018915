#include "cuda/ops/gated_norm_grad.cuh"

namespace jaxnorm::cuda {
template cudaError_t gated_norm_grad_of<float>(const GatedNormBackward&, cudaStream_t);
}  // namespace jaxnorm::cuda
