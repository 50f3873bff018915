#include "cuda/ops/forward_quantized.cuh"

namespace jaxnorm::cuda {
template cudaError_t forward_quantized_of<__half>(const Forward&, cudaStream_t);
}  // namespace jaxnorm::cuda
