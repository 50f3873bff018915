// Norms over the heads of queries and keys, and their rotary embedding. Of each row of q and of k, that is of the
// `cols` elements that a token has for a head:
//
//   h   = x_hat * (scale + scale_offset),   x_hat as of RMSNorm or LayerNorm; without a norm h = x
//   y_a = h_a * cos - h_b * sin,   y_b = h_b * cos + h_a * sin   for each pair (a, b) of the first rotary_dim columns
//   y   = h                                                      beyond them
//
// The i-th pair is (i, i + rotary_dim / 2), or of interleaved ones (2 i, 2 i + 1). Its cos and sin stand in tables, or
// are those of position * frequencies[i], computed in f32. All is computed in f32 and rounded once.
#pragma once

#include "ops/norm/call.h"
#include "ops/shared/mask.h"

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

// q or k. Token t has its row for head h at row (t / inner * heads + h) * inner + t % inner.
struct Heads {
  int64_t heads = 0;
  Input x;
  Input scale;  // of a row's length, or of `heads` rows
  bool has_scale_per_head = false;
  float *mean = nullptr, *rstd = nullptr;  // a value a row; mean of LayerNorm only; null where not wanted or no norm
  Output y;                                // of x's dtype
};

struct QkNormRotaryForward {
  HeadNorm norm;
  int64_t tokens, inner, cols;
  Heads q, k;
  Rotation rotation;
  float epsilon, scale_offset;
};

struct HeadsGrad {
  int64_t heads = 0;
  Input dy, x, scale;  // dy and x of one dtype; without a norm there are no x, scale and statistics
  bool has_scale_per_head = false;
  const float *mean = nullptr, *rstd = nullptr;
  Output dx, dscale;  // each where it is wanted
};

struct QkNormRotaryBackward {
  HeadNorm norm;
  int64_t tokens, inner, cols;
  HeadsGrad q, k;
  Rotation rotation;
  float scale_offset;
  Workspace workspace;
};

// How large a workspace the CUDA kernels want.
namespace cuda {

WorkspaceSize qk_norm_rotary_grad_workspace(const WorkspaceQuery& query);

}  // namespace cuda

}  // namespace jaxnorm
