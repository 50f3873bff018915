#include "cuda/ops/add_norm.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_add_norm<__nv_bfloat16>(const AddNormForward&, const Plan&, cudaStream_t);
}  // namespace jaxnorm::cuda
