#include "cuda/ops/group_norm.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_group_norm<float>(const GroupNormForward&, const GroupPlan&, cudaStream_t);
}  // namespace jaxnorm::cuda
