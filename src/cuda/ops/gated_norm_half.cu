#include "cuda/ops/gated_norm.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_gated_norm<__half>(const GatedNormForward&, cudaStream_t);
template cudaError_t run_gated_norm<__nv_bfloat16>(const GatedNormForward&, cudaStream_t);
}  // namespace jaxnorm::cuda
