#include "cuda/ops/cross_entropy.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_cross_entropy<__half>(const CrossEntropyForward&, cudaStream_t);
template cudaError_t run_cross_entropy<__nv_bfloat16>(const CrossEntropyForward&, cudaStream_t);
}  // namespace jaxnorm::cuda
