#include "cuda/ops/forward_gated.cuh"

namespace jaxnorm::cuda {
template cudaError_t forward_gated_of<__half>(const Forward&, cudaStream_t);
}  // namespace jaxnorm::cuda
