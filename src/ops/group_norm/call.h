// GroupNorm with channels last, and an activation. Groups are neighbouring channels; a group of an example is
// normalised over all positions:
//
//   z  = x_hat * (scale + scale_offset) + bias,   x_hat = (x - mean) * rstd,   y = activation(z)
//   dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)),   g = dz * (scale + scale_offset),   dz = dy * activation'(z)
//   dscale = sum of dz * x_hat,   dbias = sum of dz,   over positions, and examples that have the same weights
#pragma once

#include "operands.h"
#include "ops/shared/activation.h"

namespace jaxnorm {

// Which of its rows of channels a weight has for an example: the examples have these axes, the last of which runs
// fastest, and along one of stride 0 the weight does not differ. It has none where it is the same for all.
struct ExampleMap {
  static constexpr int kMost = 8;
  int axes = 0;
  int64_t extent[kMost] = {}, stride[kMost] = {};  // strides in rows of the weight

#ifdef __CUDACC__
  __host__ __device__
#endif
      int64_t row(int64_t example) const {
    int64_t row = 0;
    for (int axis = axes; axis-- > 0; example /= extent[axis]) row += example % extent[axis] * stride[axis];
    return row;
  }

// The n-th of the examples that have this row.
#ifdef __CUDACC__
  __host__ __device__
#endif
      int64_t example(int64_t row, int64_t n) const {
    if (axes == 0) return n;
    int64_t example = 0, step = 1;
    for (int axis = axes; axis-- > 0; step *= extent[axis]) {
      int64_t& rest = stride[axis] ? row : n;
      example += rest % extent[axis] * step;
      rest /= extent[axis];
    }
    return example;
  }
};

// Arrays of x's shape are contiguous: element (example, position, channel) of x lies at
// (example * positions + position) * channels() + channel. Channel c is of group c / group_size.
struct Groups {
  int64_t examples, positions, groups, group_size;
  int64_t channels() const { return groups * group_size; }
};

struct GroupWeight : Input {
  ExampleMap map;
};

struct GroupNormForward : Groups {
  Input x;
  GroupWeight scale, bias;
  Output y;
  float *mean, *rstd;  // a value for each group of each example; null where the statistics are not wanted
  float epsilon, scale_offset;
  Activation activation;
  Workspace workspace;
};

struct GroupNormBackward : Groups {
  Input dy, x;
  GroupWeight scale, bias;
  const float *mean, *rstd;
  Output dx, dscale, dbias;  // each where it is wanted; dscale and dbias have the shapes of scale and bias
  float scale_offset;
  Activation activation;
  Workspace workspace;
};

namespace cpu {

// std::bad_alloc: there is no memory for f32 weights, for rows or for sums over them.
void run(const GroupNormForward& p, const ParallelFor& parallel_for);
void run(const GroupNormBackward& p, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// cudaErrorMemoryAllocation: the workspace has too little room for any way to compute the op.
Outcome run(const GroupNormForward& p, Stream stream);
Outcome run(const GroupNormBackward& p, Stream stream);

// In either direction. A row of `query` is a group of an example: weight_rows are the groups of an example, and the
// channels of each.
WorkspaceSize group_norm_workspace(const WorkspaceQuery& query);

}  // namespace cuda

}  // namespace jaxnorm
