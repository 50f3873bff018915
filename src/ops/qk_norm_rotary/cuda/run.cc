// From a call to the code for its dtype.
#include "engine/cuda/device.h"
#include "ops/qk_norm_rotary/call.h"

namespace jaxnorm::cuda {

// For each dtype, in units that compile side by side. `back`: turned by the negative angles.
template <typename X>
cudaError_t run_qk_norm_rotary(const QkNormRotaryForward& p, bool back, cudaStream_t stream);
template <typename X>
cudaError_t run_qk_norm_rotary_grad(const QkNormRotaryBackward& p, cudaStream_t stream);

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

Outcome run(const QkNormRotaryForward& p, Stream stream) { return {run_forward(p, false, stream)}; }

Outcome run(const QkNormRotaryBackward& p, Stream stream) {
  if (p.norm == HeadNorm::none) return {run_forward(turning_back(p), true, stream)};
  return {with_dtype(p.q.dy.dtype, [&](auto type) { return run_qk_norm_rotary_grad<decltype(type)>(p, stream); })};
}

}  // namespace jaxnorm::cuda
