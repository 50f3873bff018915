// Gated RMSNorm. With a = activation(gate) and h what is normalised:
//
//   gate first:  h = x * a,   y = h_hat * (scale + scale_offset)
//   gate last:   h = x,       y = h_hat * (scale + scale_offset) * a
#pragma once

#include "operands.h"
#include "ops/shared/activation.h"

namespace jaxnorm {

// The longest row.
constexpr int64_t kGatedCols = 1 << 14;

struct Gate {
  Input data;  // of x's dtype
  Activation activation = Activation::silu;
  bool first = false;
  explicit operator bool() const { return bool{data}; }
};

// What an op has that multiplies by it.
struct Gated {
  Gate gate;
};

struct GatedNormForward {
  int64_t rows, cols;
  Input x, scale;
  Gate gate;
  Output y;     // of x's dtype
  float* rstd;  // a value a row; null where it is not wanted
  float epsilon, scale_offset;
  RowMap weight_rows;  // of scale
};

struct GatedNormBackward {
  int64_t rows, cols;
  Input dy, x, scale;  // dy and x are of one dtype
  Gate gate;
  const float* rstd;
  Output dx, dgate, dscale;  // each where it is wanted
  float scale_offset;
  RowMap weight_rows;  // of scale and dscale
  Workspace workspace;
};

}  // namespace jaxnorm
