// An array rounded to 8 bits, as quantization.h says, v being x itself. Values that share a scale are neighbours: a row,
// or a group of its columns, which is a row here.
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
