// Sums over rows have two stages, both in a fixed order: blocks leave partial sums of their rows in the workspace, and
// these are added here.
#pragma once

#include <cuda_runtime_api.h>

#include "operands.h"

namespace jaxnorm::cuda {

// Where a kernel leaves partial sums of dscale and dbias, null for what it does not sum up: `rows` rows of each.
struct Partials {
  float *dscale, *dbias;
  int64_t rows;
};

// `cols`: of a partial row.
cudaError_t sum_partials(const Partials& partials, int64_t cols, Output dscale, Output dbias, cudaStream_t stream);

// One sum: of `rows` rows that begin `stride` floats apart, the first `cols` columns.
struct PartialSum {
  const float* from;
  int64_t rows, cols, stride;
  Output to;
};

// Two in one launch, each if it has somewhere to go.
cudaError_t sum_partials(PartialSum first, PartialSum second, cudaStream_t stream);

}  // namespace jaxnorm::cuda
