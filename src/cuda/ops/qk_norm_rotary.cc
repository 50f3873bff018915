// From a call to the code for its dtype.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ops.h"
#include "cuda/ops/rotary_plan.h"

namespace jaxnorm::cuda {
namespace {

cudaError_t run_forward(const QkNormRotaryForward& p, bool back, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  const Dtype dtype = p.q.x.dtype;
  if (dtype == Dtype::f32) return run_qk_norm_rotary<float>(p, back, stream);
  return dtype == Dtype::f16 ? run_qk_norm_rotary<__half>(p, back, stream)
                             : run_qk_norm_rotary<__nv_bfloat16>(p, back, stream);
}

// Without a norm a gradient is the cotangent, turned back.
QkNormRotaryForward turning_back(const QkNormRotaryBackward& p) {
  const auto heads = [](const HeadsGrad& of) {
    Heads heads;
    heads.heads = of.heads;
    heads.x = of.dy;
    heads.y = of.dx;
    return heads;
  };
  return {HeadNorm::none, p.tokens, p.inner, p.cols, heads(p.q), heads(p.k), p.rotation, 0, 0};
}

}  // namespace

cudaError_t run(const QkNormRotaryForward& p, cudaStream_t stream) { return run_forward(p, false, stream); }

cudaError_t run(const QkNormRotaryBackward& p, cudaStream_t stream) {
  if (p.norm == HeadNorm::none) return run_forward(turning_back(p), true, stream);
  if (p.q.dy.dtype == Dtype::f32) return run_qk_norm_rotary_grad<float>(p, stream);
  return p.q.dy.dtype == Dtype::f16 ? run_qk_norm_rotary_grad<__half>(p, stream)
                                    : run_qk_norm_rotary_grad<__nv_bfloat16>(p, stream);
}

}  // namespace jaxnorm::cuda
