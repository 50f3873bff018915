#include "cuda/ops/backward.cuh"

namespace jaxnorm::cuda {
template cudaError_t backward_of<__nv_bfloat16>(const Backward&, cudaStream_t);
}  // namespace jaxnorm::cuda
