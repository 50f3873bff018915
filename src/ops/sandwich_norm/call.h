// The sandwich norm: RMSNorm of what a block gives, its sum with an addend, and RMSNorm of that.
//
//   u   = x_hat * (post_scale + scale_offset)       rounded to x's dtype
//   sum = u + addend                                rounded to the addend's dtype, and used as it is stored
//   y   = sum_hat * (scale + scale_offset)
//
// So its gradients are those of two norms: daddend is that of sum by y, to which dsum is added, and is what the
// gradients of u are computed from, as it is stored.
#pragma once

#include "operands.h"
#include "ops/norm/call.h"

namespace jaxnorm {

struct SandwichNormForward {
  int64_t rows, cols;
  Input x, addend, post_scale, scale;
  Output y;                 // of x's dtype
  Output sum;               // of the addend's dtype; may lie where the addend does
  float *post_rstd, *rstd;  // of x and of sum, a value a row; null where they are not wanted
  float epsilon, scale_offset;
  bool multiply_before_cast;
  Workspace workspace;
};

struct SandwichNormBackward {
  int64_t rows, cols;
  Input dy, x, sum, post_scale, scale;  // dy is of x's dtype
  Input dsum;                           // of sum's dtype: its cotangent from its other uses
  const float *post_rstd, *rstd;
  Output dx, daddend, dpost_scale, dscale;  // each where it is wanted; daddend is of sum's dtype
  float scale_offset;
  Workspace workspace;

  // Whether daddend is read, though it may not be wanted.
  bool goes_on() const { return dx || dpost_scale; }
};

// The two norms one after the other. What is between them lies in y until that is written.
inline NormForward post_norm_of(const SandwichNormForward& p) {
  NormForward norm{};
  norm.kind = Kind::rms;
  norm.rows = p.rows;
  norm.cols = norm.y_stride = p.cols;
  norm.x = p.x;
  norm.scale = p.post_scale;
  norm.y = p.y;
  norm.rstd = p.post_rstd;
  norm.epsilon = p.epsilon;
  norm.scale_offset = p.scale_offset;
  norm.multiply_before_cast = p.multiply_before_cast;
  norm.workspace = p.workspace;
  return norm;
}

inline ScaledAddNormForward add_norm_of(const SandwichNormForward& p) {
  ScaledAddNormForward norm{};
  static_cast<NormForward&>(norm) = post_norm_of(p);
  norm.x = {p.y.data, p.y.dtype};
  norm.addend = p.addend;
  norm.sum = p.sum;
  norm.scale = p.scale;
  norm.rstd = p.rstd;
  return norm;
}

// The gradients, the second norm's first. `daddend`: where it is, absent if nothing asks for it.
inline NormBackward sum_grad_of(const SandwichNormBackward& p, Output daddend) {
  NormBackward grad{};
  grad.kind = Kind::rms;
  grad.rows = p.rows;
  grad.cols = grad.dy_stride = p.cols;
  grad.dy = p.dy;
  grad.x = p.sum;
  grad.scale = p.scale;
  if (daddend) grad.dsum = p.dsum;
  grad.rstd = p.rstd;
  grad.dx = daddend;
  grad.dscale = p.dscale;
  grad.scale_offset = p.scale_offset;
  grad.workspace = p.workspace;
  return grad;
}

inline NormBackward x_grad_of(const SandwichNormBackward& p, Output daddend) {
  NormBackward grad = sum_grad_of(p, {});
  grad.dy = {daddend.data, daddend.dtype};
  grad.x = p.x;
  grad.scale = p.post_scale;
  grad.rstd = p.post_rstd;
  grad.dx = p.dx;
  grad.dscale = p.dpost_scale;
  return grad;
}

namespace cpu {

// std::bad_alloc: there is no memory for f32 weights, for rows or for sums over them.
void run(const SandwichNormForward& p, const ParallelFor& parallel_for);
void run(const SandwichNormBackward& p, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// cudaErrorMemoryAllocation: the workspace has too little room for any way to compute the op.
Outcome run(const SandwichNormForward& p, Stream stream);
Outcome run(const SandwichNormBackward& p, Stream stream);

// How large a workspace they want.
WorkspaceSize sandwich_norm_workspace(const WorkspaceQuery& query);
WorkspaceSize sandwich_norm_grad_workspace(const WorkspaceQuery& query);

}  // namespace cuda

}  // namespace jaxnorm
