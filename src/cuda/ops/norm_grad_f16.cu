#include "cuda/ops/norm_grad_launch.cuh"

namespace jaxnorm::cuda {
template cudaError_t norm_grad_of<__half>(const NormBackward&, cudaStream_t);
}  // namespace jaxnorm::cuda
