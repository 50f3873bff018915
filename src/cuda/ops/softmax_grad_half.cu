#include "cuda/ops/softmax_grad_launch.cuh"

namespace jaxnorm::cuda {
template cudaError_t softmax_grad_of<__half>(const SoftmaxBackward&, cudaStream_t);
template cudaError_t log_softmax_grad_of<__half>(const LogSoftmaxBackward&, cudaStream_t);
template cudaError_t softmax_grad_of<__nv_bfloat16>(const SoftmaxBackward&, cudaStream_t);
template cudaError_t log_softmax_grad_of<__nv_bfloat16>(const LogSoftmaxBackward&, cudaStream_t);
}  // namespace jaxnorm::cuda
