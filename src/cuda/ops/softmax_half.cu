#include "cuda/ops/softmax.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_softmax<__half>(const SoftmaxForward&, const Plan&, cudaStream_t);
template cudaError_t run_softmax<__nv_bfloat16>(const SoftmaxForward&, const Plan&, cudaStream_t);
}  // namespace jaxnorm::cuda
