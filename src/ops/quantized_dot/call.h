// The product of two matrices of 8-bit floats with a scale for each row of x and for each column of y, summed in f32:
//
//   y[r, c] = x_scales[r] * weight_scales[c] * sum over k of x[r, k] * weights[c, k]  + bias[c]
#pragma once

#include <string>

#include "operands.h"

namespace jaxnorm {

// That to which cuBLASLt takes the matrices, in elements of a row and of a column, and in bytes of an address.
constexpr int64_t kDotMultiple = 16;

struct QuantizedDot {
  int64_t rows, cols, depth;
  Input x;        // rows * depth, float8
  Input weights;  // cols * depth, float8, of which at most one matrix is f8e5m2
  const float* x_scales;
  const float* weight_scales;
  Input bias;              // cols values of y's dtype, which is not f32 then
  Output y;                // rows * cols
  bool fast_accumulation;  // with fewer digits than f32 has
  Workspace workspace;
};

namespace cuda {

// Why it was not launched, since more than CUDA may refuse it; empty where it was.
std::string run(const QuantizedDot& p, Stream stream);

// The same for all shapes.
WorkspaceSize quantized_dot_workspace(const WorkspaceQuery& query);

}  // namespace cuda

}  // namespace jaxnorm
