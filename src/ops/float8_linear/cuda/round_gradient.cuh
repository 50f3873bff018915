// A gradient rounded to float8 both by rows and by columns, with factors of their own. One kernel has the rows and
// finds the columns' largest magnitudes, another one has the columns: as many bytes as by two kernels that know nothing
// of each other, and neither has to hold a column.
#pragma once

#include "ops/float8_linear/cuda/round_rows.cuh"
#include "ops/float8_linear/cuda/round_tiles.cuh"

namespace jaxnorm::cuda {

template <typename X>
cudaError_t run_round_gradient(const RoundGradient& p, cudaStream_t stream) {
  if (p.workspace.floats < p.cols) return cudaErrorMemoryAllocation;
  const ColumnsOf columns{p.x.data, p.rows, p.cols, {p.workspace.data, p.of_rows}};
  cudaError_t error = cudaMemsetAsync(p.workspace.data, 0, p.cols * sizeof(float), stream);
  const bool together = p.values && p.cols <= (current_device().shared_bytes - kOwnBytes) / int64_t{sizeof(float)};
  if (error == cudaSuccess && p.values) {
    const RowRounding rows{p.x.data, p.of_columns, p.rows, to_float8(p, p.values, p.scales),
                           together ? columns.columns : Magnitudes{}};
    error = round_rows<X>(rows, stream);
  }
  if (error == cudaSuccess && !together) error = largest_of_columns<X>(columns, stream);
  if (error != cudaSuccess) return error;
  return round_tiles<X>(
      {columns, to_float8(p, p.transposed, p.column_scales), nullptr, static_cast<uint8_t*>(p.transposed.data)},
      stream);
}

}  // namespace jaxnorm::cuda
