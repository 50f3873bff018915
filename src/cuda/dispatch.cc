#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/norms.h"

namespace jaxnorm::cuda {
namespace {

template <typename F>
cudaError_t with_dtype(Dtype dtype, F f) {
  if (dtype == Dtype::f32) return f(float{});
  return dtype == Dtype::f16 ? f(__half{}) : f(__nv_bfloat16{});
}

}  // namespace

cudaError_t forward(const Forward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  const cudaError_t fused = with_dtype(p.residual ? p.residual.dtype : p.x.dtype, [&](auto type) {
    using X = decltype(type);
    if (p.gate) return forward_gated_of<X>(p, stream);
    if (p.quantized.values.data) return forward_quantized_of<X>(p, stream);
    return p.residual ? forward_added_of<X>(p, stream) : forward_of<X>(p, stream);
  });
  if (!p.residual || fused != cudaErrorNotSupported) return fused;
  const cudaError_t error = add(p, stream);
  if (error != cudaSuccess) return error;
  Forward norm = p;
  norm.x = {p.sum.data, p.sum.dtype};
  norm.residual = {}, norm.sum = {};
  return forward(norm, stream);
}

}  // namespace jaxnorm::cuda
