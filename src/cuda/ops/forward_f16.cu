#include "cuda/ops/forward.cuh"

namespace jaxnorm::cuda {
template cudaError_t forward_of<__half>(const Forward&, cudaStream_t);
}  // namespace jaxnorm::cuda
