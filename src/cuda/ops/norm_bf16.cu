#include "cuda/ops/norm.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_norm<__nv_bfloat16>(const NormForward&, const Plan&, cudaStream_t);
}  // namespace jaxnorm::cuda
