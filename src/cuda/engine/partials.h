// The second stage of the sums over rows: partial sums of dscale and dbias, added in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include "norm.h"

namespace jaxnorm::cuda {

// Where a kernel leaves partial sums of dscale and dbias, null for what it does not sum up: `rows` rows of
// p.heads.count * p.cols each.
struct Partials {
  float *dscale, *dbias;
  int64_t rows;
};

cudaError_t sum_partials(const Backward& p, const Partials& partials, cudaStream_t stream);

}  // namespace jaxnorm::cuda
