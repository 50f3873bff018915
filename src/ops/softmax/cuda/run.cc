// From a call of softmax or log-softmax to the code for its dtype, with a plan that is made once.
#include "engine/cuda/device.h"
#include "ops/softmax/cuda.h"
#include "ops/softmax/cuda/regimes.h"

namespace jaxnorm::cuda {

struct AnyElement;

// Its rows are those of an RMSNorm: read once, and written. Those with a window have a plan of their own.
cudaError_t run(const SoftmaxForward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  const Plan plan = p.mask.starts
                        ? make_window_plan(p.x.dtype, p.cols)
                        : make_forward_plan(/*centred=*/false, p.x.dtype, p.cols, current_device().max_cluster());
  return with_dtype(p.x.dtype, [&](auto type) { return run_softmax<decltype(type)>(p, plan, stream); });
}

cudaError_t run(const SoftmaxBackward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.dx.dtype != p.y.dtype) return softmax_grad_of<AnyElement>(p, stream);
  return with_dtype(p.y.dtype, [&](auto type) { return softmax_grad_of<decltype(type)>(p, stream); });
}

cudaError_t run(const LogSoftmaxBackward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.dy.dtype != p.x.dtype) return log_softmax_grad_of<AnyElement>(p, stream);
  return with_dtype(p.x.dtype, [&](auto type) { return log_softmax_grad_of<decltype(type)>(p, stream); });
}

WorkspaceSize softmax_workspace(const WorkspaceQuery& query) {
  return {0, has_tickets(/*centred=*/false, query.dtype, query.cols) ? 1 : 0};
}

}  // namespace jaxnorm::cuda
