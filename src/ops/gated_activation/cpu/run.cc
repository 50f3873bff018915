// The launches of gated activations.
#include "cpu/engine/isa.h"
#include "ops/gated_activation/cpu.h"

namespace jaxnorm::cpu {
namespace {

// Calls task(parts, begin, end) for parts of rows: a row may be as long as all of an array.
template <class Task>
void for_each_parts(const ParallelFor& parallel_for, const GatedShape& shape, Task task) {
  if (shape.rows * shape.cols == 0) return;
  const RowParts parts{ceil_div(shape.cols, kTaskElements), std::min(shape.cols, kTaskElements)};
  for_each_block(parallel_for, shape.rows * parts.count, std::max<int64_t>(1, kTaskElements / parts.cols),
                 [&](int64_t begin, int64_t end) { task(parts, begin, end); });
}

}  // namespace

void run(const GatedActivationForward& p, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, traffic = 3 * elements * size_of(p.y.dtype);
  expect_writes(p.y, elements);
  for_each_parts(parallel_for, p, [&](RowParts parts, int64_t begin, int64_t end) {
    kernels<GatedActivationKernels>().forward(p, parts, begin, end, traffic);
  });
}

void run(const GatedActivationQuantizedForward& p, const ParallelFor& parallel_for) {
  expect_writes(p.quantized.values, p.rows * p.cols);
  for_each_rows_with_room(parallel_for, p.rows, p.cols, p.cols, [&](int64_t begin, int64_t end, float* y) {
    kernels<GatedActivationKernels>().quantized(p, begin, end, y);
  });
}

void run(const GatedActivationBackward& p, const ParallelFor& parallel_for) {
  const int64_t traffic = 5 * p.rows * p.cols * size_of(p.dy.dtype);
  expect_writes(p.dgate, p.rows * p.stride);
  if (p.stride == p.cols) expect_writes(p.dup, p.rows * p.cols);
  for_each_parts(parallel_for, p, [&](RowParts parts, int64_t begin, int64_t end) {
    kernels<GatedActivationKernels>().backward(p, parts, begin, end, traffic);
  });
}

}  // namespace jaxnorm::cpu
