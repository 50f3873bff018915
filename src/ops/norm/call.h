// RMSNorm and LayerNorm.
//
//   y  = x_hat * (scale + scale_offset) + bias,   x_hat = (x - mean) * rstd   (RMSNorm: no mean)
//   dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)),   g = dy * (scale + scale_offset)   (RMSNorm: no mean(g))
//   dscale = sum over rows of dy * x_hat,   dbias = sum over rows of dy
//
// x may be a sum, y quantised, and RMSNorm gated: with a = activation(gate) and h what is normalised,
//
//   gate first:  h = x * a,   y = h_hat * (scale + scale_offset)
//   gate last:   h = x,       y = h_hat * (scale + scale_offset) * a
#pragma once

#include "operands.h"
#include "ops/shared/activation.h"
#include "ops/shared/quantization.h"

namespace jaxnorm {

enum class Kind : uint8_t { rms, layer };

// The longest row with a gate.
constexpr int64_t kGatedCols = 1 << 14;

// Rows are contiguous: element (r, c) of an array of rows lies at r * cols + c, unless it has a stride of its own.
struct NormOperands {
  Kind kind;
  int64_t rows, cols;
  Input x, scale, bias;
  float* mean;  // LayerNorm: a value a row; null where the statistics are not wanted
  float* rstd;  // a value a row; null where the statistics are not wanted
  float epsilon, scale_offset;
  RowMap weight_rows;  // of scale and bias
};

struct NormForward : NormOperands {
  Output y;
  int64_t y_stride;           // elements from a row of y to the next; what is beyond cols is set to zero
  bool multiply_before_cast;  // false: x_hat is rounded to y's dtype before it is multiplied by scale
  Workspace workspace;
};

struct NormBackward {
  Kind kind;
  int64_t rows, cols;
  Input dy, x, scale;
  Input dsum;  // of x's dtype, added to dx: the cotangent of a sum that was normalised, from its other uses
  const float *mean, *rstd;
  Output dx, dscale, dbias;  // each where it is wanted
  int64_t dy_stride;         // elements from a row of dy to the next; what is beyond cols is not read
  float scale_offset;
  RowMap weight_rows;  // of scale, dscale and dbias
  Workspace workspace;
};

// The norm of sum = x + addend, which is rounded to the addend's dtype and normalised as it is stored.

// What x is added to before it is normalised.
struct AddFirst {
  Input addend;  // absent: x is normalised
  Output sum;    // may lie where the addend does; absent, and the addend there: the sum is not wanted
};

// Without an addend the norm of x.
struct AddNormForward : NormForward, AddFirst {};

// And before that x is multiplied by a weight, in f32 and rounded so.
struct ScaledAddNormForward : AddNormForward {
  Input branch_scale;  // with scale's rows; absent: x itself is added
};

// sum = factor * a + b, rounded to b's dtype; sum may lie where b does. Without a factor, a + b. Without b, a rounded
// to sum's dtype.
struct Addition {
  Input a, b;
  Output sum;
  Input factor = {};
  RowMap factor_rows = {};
};

template <class Op>
Addition addition_of(const Op& p) {
  return {p.x, p.addend, p.sum};
}

inline Addition addition_of(const ScaledAddNormForward& p) {
  return {p.x, p.addend, p.sum, p.branch_scale, p.weight_rows};
}

// A sum that is not wanted and that no kernel has at hand is in y, whose dtype is then the addend's, until y is there.
inline ScaledAddNormForward with_sum_somewhere(ScaledAddNormForward p) {
  if (!p.sum) p.sum = p.y;
  return p;
}

// The op of a sum that is stored already.
template <class Op>
Op of_sum(Op p) {
  p.x = {p.sum.data, p.sum.dtype};
  static_cast<AddFirst&>(p) = {};
  return p;
}

// A result of 8 bits, of x or of a sum: y as of `Quantization`. Where it is wanted, y is written as well, rounded.
struct QuantizedNormForward : NormOperands, AddFirst {
  Quantization quantized;
  Output y;  // null where it is not wanted
};

struct ScaledAddQuantizedNormForward : QuantizedNormForward {
  Input branch_scale;  // as of ScaledAddNormForward, with rows of its own
  RowMap branch_rows;
};

inline Addition addition_of(const ScaledAddQuantizedNormForward& p) {
  return {p.x, p.addend, p.sum, p.branch_scale, p.branch_rows};
}

// The two ops that do the same, where no kernel has all of it.
inline NormForward norm_of(const QuantizedNormForward& p) {
  NormForward norm{};
  static_cast<NormOperands&>(norm) = p;
  norm.mean = norm.rstd = nullptr;
  norm.y = p.y;
  norm.y_stride = p.cols;
  norm.multiply_before_cast = true;
  return norm;
}

inline QuantizedNormForward without_y(QuantizedNormForward p) {
  p.y = {};
  return p;
}

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

// With a result of 8 bits, of y in f32 that is never stored. Without a bias or an addend; smooth has a row for each of
// scale's.
struct GatedNormQuantizedForward : QuantizedNormForward, Gated {};

// Of rows that are sharded over devices: the statistics of a device's shard of each row, which the devices exchange,
// and y of the shard from the statistics of whole rows.

struct ShardStatistics {
  Kind kind;
  int64_t rows, cols;
  Input x;
  float* mean;      // LayerNorm: a value a row
  float* variance;  // a value a row: about the shard's own mean; RMSNorm: about zero
};

struct ShardApply {
  Kind kind;
  int64_t rows, cols;
  Input x, scale, bias;
  Output y;
  const float* mean;  // LayerNorm only
  const float* rstd;
  float scale_offset;
  bool multiply_before_cast;
};

namespace cpu {

// std::bad_alloc: there is no memory for f32 weights, for rows or for sums over them.
void run(const NormForward& p, const ParallelFor& parallel_for);
void run(const ScaledAddNormForward& p, const ParallelFor& parallel_for);
void run(const ScaledAddQuantizedNormForward& p, const ParallelFor& parallel_for);
void run(const GatedNormForward& p, const ParallelFor& parallel_for);
void run(const GatedNormQuantizedForward& p, const ParallelFor& parallel_for);
void run(const NormBackward& p, const ParallelFor& parallel_for);
void run(const GatedNormBackward& p, const ParallelFor& parallel_for);

}  // namespace cpu

// Nothing here allocates or asks the stream anything: calls may be captured into CUDA graphs.
namespace cuda {

// cudaErrorMemoryAllocation: the workspace has too little room for any way to compute the op.
Outcome run(const NormForward& p, Stream stream);
Outcome run(const ScaledAddNormForward& p, Stream stream);
Outcome run(const ScaledAddQuantizedNormForward& p, Stream stream);
Outcome run(const GatedNormForward& p, Stream stream);
Outcome run(const GatedNormQuantizedForward& p, Stream stream);
Outcome run(const NormBackward& p, Stream stream);
Outcome run(const GatedNormBackward& p, Stream stream);
Outcome run(const ShardStatistics& p, Stream stream);
Outcome run(const ShardApply& p, Stream stream);
Outcome add(const Addition& p, int64_t rows, int64_t cols, Stream stream);

// How large a workspace they want.
template <Kind kind>
WorkspaceSize norm_workspace(const WorkspaceQuery& query);
WorkspaceSize norm_grad_workspace(const WorkspaceQuery& query);
WorkspaceSize gated_norm_grad_workspace(const WorkspaceQuery& query);

}  // namespace cuda

}  // namespace jaxnorm
