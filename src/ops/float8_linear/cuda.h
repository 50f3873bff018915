// What a call runs on CUDA. Nothing here allocates or asks the stream anything: calls may be captured into CUDA graphs.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/float8_linear/call.h"

namespace jaxnorm::cuda {

cudaError_t run(const RoundRows& p, cudaStream_t stream);
cudaError_t run(const RoundColumns& p, cudaStream_t stream);
cudaError_t run(const RoundGradient& p, cudaStream_t stream);
cudaError_t run(const TransposeBytes& p, cudaStream_t stream);

template <typename X>
cudaError_t run_round_rows(const RoundRows& p, cudaStream_t stream);
template <typename X>
cudaError_t run_round_columns(const RoundColumns& p, cudaStream_t stream);
template <typename X>
cudaError_t run_round_gradient(const RoundGradient& p, cudaStream_t stream);

}  // namespace jaxnorm::cuda
