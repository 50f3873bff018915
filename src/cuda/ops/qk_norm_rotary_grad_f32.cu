#include "cuda/ops/qk_norm_rotary_grad.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_qk_norm_rotary_grad<float>(const QkNormRotaryBackward&, cudaStream_t);
}  // namespace jaxnorm::cuda
