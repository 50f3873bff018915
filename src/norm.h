// The operands of all ops in two structs: being replaced by ops/*.h.
#pragma once

#include "ops/add_norm.h"
#include "ops/gated_norm.h"
#include "ops/norm_shard.h"
#include "ops/quantized_norm.h"

namespace jaxnorm {

// y = x_hat * (scale + scale_offset) + bias, and the row statistics from which the backward rebuilds x_hat. With a
// residual it is sum = x + residual, in the residual's dtype, that is normalised; sum may be where the residual was. A
// gate goes with neither a residual nor a bias; everything between its operands and y is f32.
struct Forward {
  Kind kind;
  int64_t rows, cols;
  Input x, residual, scale, bias;
  Output y, sum;
  float* mean;  // rows values, layer norm only; null when the statistics are not wanted
  float* rstd;  // rows values; null when the statistics are not wanted
  float epsilon, scale_offset;
  bool multiply_before_cast;  // false: x_hat is rounded to y's dtype before the multiplication by scale
  Quantization quantized;     // with values: y is absent and multiply_before_cast true
  RowMap weight_rows;         // of scale and bias
  int64_t y_pad = 0;          // zeros that are written after each row of y
  Gate gate;
  uint32_t* tickets = nullptr;  // CUDA: a count, for rows that clusters draw
};

// The cotangents of x, scale and bias for the cotangent dy of y. dsum, of x's dtype, is added to dx: what else x is
// used for, where it is the sum of a residual connection.
struct Backward {
  Kind kind;
  int64_t rows, cols;
  Input dy, x, scale, dsum;
  const float *mean, *rstd;
  Output dx, dscale, dbias;
  float* row_sums;   // CUDA: rows * segments pairs of sums, for dx of rows that are cut into segments
  float* workspace;  // CUDA: partial sums of dscale and dbias, (one or two arrays) * partial_rows * weight_rows.count *
                     // cols
  float scale_offset;
  RowMap weight_rows;  // of scale, dscale and dbias
  int64_t dy_pad = 0;  // columns after each row of dy that are not read
  Gate gate;
  Output dgate;  // wanted or not, as dx
};

}  // namespace jaxnorm
