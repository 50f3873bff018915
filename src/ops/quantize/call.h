// An array rounded to 8 bits, as quantization.h says; v is x. What shares a scale is a row here: a row of x, or a group
// of its columns.
#pragma once

#include "operands.h"
#include "ops/shared/quantization.h"

namespace jaxnorm {

// (rows, cols), a scale for each row.
struct QuantizeForward {
  int64_t rows, cols;
  Input x;
  Quantization quantized;
};

namespace cpu {

void run(const QuantizeForward& p, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

Outcome run(const QuantizeForward& p, Stream stream);

}  // namespace cuda

}  // namespace jaxnorm
