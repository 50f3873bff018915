#include "cuda/ops/quantized_norm.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_quantized_norm<float>(const QuantizedNormForward&, const Plan&, cudaStream_t);
}  // namespace jaxnorm::cuda
