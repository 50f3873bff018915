#include "cuda/ops/group_norm_grad.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_group_norm_grad<__half>(const GroupNormBackward&, const GroupPlan&, cudaStream_t);
template cudaError_t run_group_norm_grad<__nv_bfloat16>(const GroupNormBackward&, const GroupPlan&, cudaStream_t);
}  // namespace jaxnorm::cuda
