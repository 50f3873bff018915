#include "cuda/ops/softmax.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_softmax<float>(const SoftmaxForward&, const Plan&, cudaStream_t);
}  // namespace jaxnorm::cuda
