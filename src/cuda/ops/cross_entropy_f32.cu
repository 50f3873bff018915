#include "cuda/ops/cross_entropy.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_cross_entropy<float>(const CrossEntropyForward&, cudaStream_t);
}  // namespace jaxnorm::cuda
