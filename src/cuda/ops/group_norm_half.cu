#include "cuda/ops/group_norm.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_group_norm<__half>(const GroupNormForward&, const GroupPlan&, cudaStream_t);
template cudaError_t run_group_norm<__nv_bfloat16>(const GroupNormForward&, const GroupPlan&, cudaStream_t);
}  // namespace jaxnorm::cuda
