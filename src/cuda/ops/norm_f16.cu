#include "cuda/ops/norm.cuh"

namespace jaxnorm::cuda {
template cudaError_t run_norm<__half>(const NormForward&, const Plan&, cudaStream_t);
}  // namespace jaxnorm::cuda
