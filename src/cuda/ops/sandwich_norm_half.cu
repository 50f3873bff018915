#include "cuda/ops/sandwich_norm.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_sandwich_norm<__half>(const SandwichNormForward&, const Plan&, cudaStream_t);
template cudaError_t run_sandwich_norm<__nv_bfloat16>(const SandwichNormForward&, const Plan&, cudaStream_t);
}  // namespace jaxnorm::cuda
