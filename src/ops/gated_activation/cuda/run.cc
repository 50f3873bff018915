// The launches of gated activations.
#include "engine/cuda/device.h"
#include "ops/gated_activation/cuda.h"

namespace jaxnorm::cuda {

cudaError_t run(const GatedActivationForward& p, cudaStream_t stream) {
  return with_dtype(p.y.dtype, [&](auto x) { return run_gated_activation<decltype(x)>(p, stream); });
}

cudaError_t run(const GatedActivationQuantizedForward& p, cudaStream_t stream) {
  return with_dtype(p.gate.dtype, [&](auto x) { return run_gated_activation_quantized<decltype(x)>(p, stream); });
}

cudaError_t run(const GatedActivationBackward& p, cudaStream_t stream) {
  return with_dtype(p.dy.dtype, [&](auto x) { return run_gated_activation_grad<decltype(x)>(p, stream); });
}

}  // namespace jaxnorm::cuda
