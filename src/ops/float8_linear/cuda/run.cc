// The launches of what a linear layer in float8 rounds.
#include "engine/cuda/device.h"
#include "ops/float8_linear/cuda.h"

namespace jaxnorm::cuda {

cudaError_t run(const RoundRows& p, cudaStream_t stream) {
  return with_dtype(p.x.dtype, [&](auto x) { return run_round_rows<decltype(x)>(p, stream); });
}

cudaError_t run(const RoundColumns& p, cudaStream_t stream) {
  return with_dtype(p.x.dtype, [&](auto x) { return run_round_columns<decltype(x)>(p, stream); });
}

cudaError_t run(const RoundGradient& p, cudaStream_t stream) {
  return with_dtype(p.x.dtype, [&](auto x) { return run_round_gradient<decltype(x)>(p, stream); });
}

WorkspaceSize round_columns_workspace(const WorkspaceQuery& query) { return {0, query.cols}; }

}  // namespace jaxnorm::cuda
