#include "cuda/ops/gated_norm_quantized.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_gated_norm_quantized<__half>(const GatedNormQuantizedForward&, cudaStream_t);
template cudaError_t run_gated_norm_quantized<__nv_bfloat16>(const GatedNormQuantizedForward&, cudaStream_t);
}  // namespace jaxnorm::cuda
