#include "cuda/ops/qk_norm_rotary_grad.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_qk_norm_rotary_grad<__half>(const QkNormRotaryBackward&, cudaStream_t);
template cudaError_t run_qk_norm_rotary_grad<__nv_bfloat16>(const QkNormRotaryBackward&, cudaStream_t);
}  // namespace jaxnorm::cuda
