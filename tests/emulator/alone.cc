// What stands alone, as Python calls it: a product by way of copies, with what multiplies these in place of cuBLASLt,
// and the op of tests/toy.
#include "ops/quantized_dot/cuda/copied_dot.h"
#include "toy/l2_norm.h"

namespace toy {
cudaError_t run(const L2NormForward& p, cudaStream_t stream);
cudaError_t run(const L2NormBackward& p, cudaStream_t stream);
}  // namespace toy

extern "C" {

// Whether there was room.
bool copied_dot(const jaxnorm::QuantizedDot* p, char* room, int64_t bytes,
                void (*multiply)(const jaxnorm::QuantizedDot*)) {
  const auto run = [&](const jaxnorm::QuantizedDot& block) { return multiply(&block), std::string(); };
  return jaxnorm::cuda::CopiedDot(*p, {room, bytes}, nullptr).run(run).empty();
}

cudaError_t l2_norm_fwd(const toy::L2NormForward* p) { return toy::run(*p, nullptr); }
cudaError_t l2_norm_bwd(const toy::L2NormBackward* p) { return toy::run(*p, nullptr); }

}  // extern "C"
