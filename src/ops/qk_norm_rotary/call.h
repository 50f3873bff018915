// Norms over the heads of queries and keys, and their rotary embedding. Of each row of q and of k, that is of the
// `cols` elements that a token has for a head:
//
//   h   = x_hat * (scale + scale_offset),   x_hat as of RMSNorm or LayerNorm; without a norm h = x
//   y_a = h_a * cos - h_b * sin,   y_b = h_b * cos + h_a * sin   for each pair (a, b) of the first rotary_dim columns
//   y   = h                                                      beyond them
//
// The i-th pair is (i, i + rotary_dim / 2), or of interleaved ones (2 i, 2 i + 1). Its cos and sin stand in tables, or
// are those of position * frequencies[i], computed in f32. All is computed in f32 and rounded once.
//
// q and k may be parts of one packed array, of which a token has the heads of q, those of k and those of the values v;
// these are copied as they are.
#pragma once

#include "operands.h"
#include "ops/norm/call.h"

namespace jaxnorm {

enum class HeadNorm : uint8_t { none, rms, layer };

// The longest row.
constexpr int64_t kRotaryCols = 512;

struct Rotation {
  int64_t dim = 0;  // rotary_dim
  bool interleaved = false;
  // Of a token: a row of dim / 2 elements of both tables, or a position. `token_rows`: which goes with which token.
  const float *cos = nullptr, *sin = nullptr;
  const float* positions = nullptr;
  const float* frequencies = nullptr;  // dim / 2 elements
  BroadcastRows token_rows;
};

// q or k. Token t has its row for head h at row (t / inner * rows + h) * inner + t % inner, where `rows` are as many as
// there are heads or, of a packed array whose part for q or k begins here, those of all its heads; `inner` is 1 there.
struct Heads {
  int64_t heads = 0;
  int64_t x_rows = 0, y_rows = 0;  // `rows` of x and of y; if there are statistics, these lie as y does
  Input x;
  Input scale;  // of a row's length, or of `heads` rows
  bool has_scale_per_head = false;
  float *mean = nullptr, *rstd = nullptr;  // a value a row; mean of LayerNorm only; null where not wanted or no norm
  Output y;                                // of x's dtype
};

// The values of a packed array, or their gradient, of as many heads as k: x is copied to y, which is zero without x.
struct Values {
  int64_t x_rows = 0, y_rows = 0;
  Input x;
  Output y;  // where it is wanted
};

struct QkNormRotaryForward {
  HeadNorm norm;
  int64_t tokens, inner, cols;
  Heads q, k;
  Values v;
  Rotation rotation;
  float epsilon, scale_offset;
};

struct HeadsGrad {
  int64_t heads = 0;
  int64_t x_rows = 0;  // `rows` of x and dx; dy and the statistics have as many as there are heads
  Input dy, x, scale;  // dy and x of one dtype; without a norm there are no x, scale and statistics
  bool has_scale_per_head = false;
  const float *mean = nullptr, *rstd = nullptr;
  Output dx, dscale;  // each where it is wanted
};

struct QkNormRotaryBackward {
  HeadNorm norm;
  int64_t tokens, inner, cols;
  HeadsGrad q, k;
  Values v;
  Rotation rotation;
  float scale_offset;
  Workspace workspace;
};

namespace cpu {

// std::bad_alloc: there is no memory for f32 weights, for rows or for sums over them.
void run(const QkNormRotaryForward& p, const ParallelFor& parallel_for);
void run(const QkNormRotaryBackward& p, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// cudaErrorMemoryAllocation: the workspace has too little room for any way to compute the op.
Outcome run(const QkNormRotaryForward& p, Stream stream);
Outcome run(const QkNormRotaryBackward& p, Stream stream);

// How large a workspace it wants.
WorkspaceSize qk_norm_rotary_grad_workspace(const WorkspaceQuery& query);

}  // namespace cuda

}  // namespace jaxnorm
