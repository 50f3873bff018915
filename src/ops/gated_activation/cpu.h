// What a call runs on the CPU: `run` on the threads that it is given, and the kernels of an instruction set.
#pragma once

#include "cpu/engine/parallel.h"
#include "ops/gated_activation/call.h"

namespace jaxnorm::cpu {

void run(const GatedActivationForward& p, const ParallelFor& parallel_for);
// std::bad_alloc: there is no memory for a row.
void run(const GatedActivationQuantizedForward& p, const ParallelFor& parallel_for);
void run(const GatedActivationBackward& p, const ParallelFor& parallel_for);

// A row is divided into so many parts of as many columns, of which the last may have fewer.
struct RowParts {
  int64_t count, cols;
};

// Of parts [begin, end) of all rows; `traffic` is how many bytes all of the call reads and writes.
struct GatedActivationKernels {
  static const GatedActivationKernels baseline, avx2, avx512;

  void (*forward)(const GatedActivationForward& p, RowParts parts, int64_t begin, int64_t end, int64_t traffic);
  // Of rows [begin, end), with room for one of float32.
  void (*quantized)(const GatedActivationQuantizedForward& p, int64_t begin, int64_t end, float* y);
  void (*backward)(const GatedActivationBackward& p, RowParts parts, int64_t begin, int64_t end, int64_t traffic);
};

}  // namespace jaxnorm::cpu
