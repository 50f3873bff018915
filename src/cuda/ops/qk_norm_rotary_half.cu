#include "cuda/ops/qk_norm_rotary.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_qk_norm_rotary<__half>(const QkNormRotaryForward&, bool, cudaStream_t);
template cudaError_t run_qk_norm_rotary<__nv_bfloat16>(const QkNormRotaryForward&, bool, cudaStream_t);
}  // namespace jaxnorm::cuda
