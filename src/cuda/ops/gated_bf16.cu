#include "cuda/ops/backward_gated.cuh"
#include "cuda/ops/gated_norm.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_gated_norm<__nv_bfloat16>(const GatedNormForward&, const Plan&, cudaStream_t);
template cudaError_t backward_gated_of<__nv_bfloat16>(const Backward&, cudaStream_t);
}  // namespace jaxnorm::cuda
