#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/norms.h"

namespace jaxnorm::cuda {

cudaError_t forward(const Forward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.x.dtype == Dtype::f32) return forward_of<float>(p, stream);
  return p.x.dtype == Dtype::f16 ? forward_of<__half>(p, stream) : forward_of<__nv_bfloat16>(p, stream);
}

cudaError_t backward(const Backward& p, cudaStream_t stream) {
  if (p.x.dtype == Dtype::f32) return backward_of<float>(p, stream);
  return p.x.dtype == Dtype::f16 ? backward_of<__half>(p, stream) : backward_of<__nv_bfloat16>(p, stream);
}

}  // namespace jaxnorm::cuda
