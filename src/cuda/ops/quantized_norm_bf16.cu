#include "cuda/ops/quantized_norm.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_quantized_norm<__nv_bfloat16>(const QuantizedNormForward&, const Plan&, cudaStream_t);
}  // namespace jaxnorm::cuda
