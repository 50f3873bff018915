#include "cuda/ops/backward.cuh"

namespace jaxnorm::cuda {
template cudaError_t backward_of<float>(const Backward&, cudaStream_t);
}  // namespace jaxnorm::cuda
