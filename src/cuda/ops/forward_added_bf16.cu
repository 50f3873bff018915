#include "cuda/ops/forward_added.cuh"

namespace jaxnorm::cuda {
template cudaError_t forward_added_of<__nv_bfloat16>(const Forward&, cudaStream_t);
}  // namespace jaxnorm::cuda
