// From a call to the code for its dtype.
#include "engine/cuda/dtypes.h"
#include "ops/qk_norm_rotary/cuda.h"

namespace jaxnorm::cuda {
namespace {

cudaError_t run_forward(const QkNormRotaryForward& p, bool back, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  return with_dtype(p.q.x.dtype, [&](auto type) { return run_qk_norm_rotary<decltype(type)>(p, back, stream); });
}

// Without a norm a gradient is the cotangent, turned back.
QkNormRotaryForward turning_back(const QkNormRotaryBackward& p) {
  const auto heads = [](const HeadsGrad& of) {
    Heads heads;
    heads.heads = heads.x_rows = of.heads;
    heads.y_rows = of.x_rows;
    heads.x = of.dy;
    heads.y = of.dx;
    return heads;
  };
  return {HeadNorm::none, p.tokens, p.inner, p.cols, heads(p.q), heads(p.k), p.v, p.rotation, 0, 0};
}

}  // namespace

cudaError_t run(const QkNormRotaryForward& p, cudaStream_t stream) { return run_forward(p, false, stream); }

cudaError_t run(const QkNormRotaryBackward& p, cudaStream_t stream) {
  if (p.norm == HeadNorm::none) return run_forward(turning_back(p), true, stream);
  return with_dtype(p.q.dy.dtype, [&](auto type) { return run_qk_norm_rotary_grad<decltype(type)>(p, stream); });
}

}  // namespace jaxnorm::cuda
