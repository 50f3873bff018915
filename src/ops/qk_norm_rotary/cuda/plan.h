// How the kernels of rotary embedding share out rows: pure functions of shapes and dtypes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "engine/cuda/plan.h"
#include "ops/qk_norm_rotary/call.h"

namespace jaxnorm::cuda {

constexpr int kRotaryThreads = 128;  // of a block

// The longest row that has fewer units of small vectors.
constexpr int64_t kShortRotaryCols = 128;

// The thread groups of a block: `lanes` threads a row, each with `units` of two vectors (rotary.cuh). A vector is
// of two elements or one where longer ones would not divide rows, and the halves of what is rotated.
struct RotaryTiling {
  int vector, lanes, units;

  int groups() const { return kRotaryThreads / lanes; }
};

RotaryTiling make_rotary_tiling(Dtype x, int64_t cols, int64_t dim, bool interleaved);

// The tiles of q or of k. A tile is `heads` neighbouring heads of `tokens` neighbouring tokens, one row for each thread
// group: a power of two of heads, so that the last tile of a token may have more than there are.
struct HeadTiles {
  int heads = 1, tokens = 1;
  int64_t count = 0;  // of all heads

  int64_t of_tokens(int64_t all) const { return (all + tokens - 1) / tokens; }
  // Of blocks that have `rows` tiles each, of neighbouring tokens.
  int64_t blocks(int64_t all, int rows) const { return (of_tokens(all) + rows - 1) / rows * count; }
};

// `inner`: as of QkNormRotaryForward. Where a tile has many heads, angles are computed for few; where it is less than
// full, thread groups are idle.
HeadTiles make_head_tiles(int64_t heads, int64_t inner, int groups);

// The blocks of the backward for q or for k. A block computes the angles of a few neighbouring tokens, those of a tile,
// and then has `share` neighbouring tiles of them: an item. If each head has its own scale, a block has tiles of the
// same heads, those of every `blocks`-th token tile; else it has every `blocks`-th item. It leaves a row of sums for
// each of its scales.
struct GradBlocks {
  int64_t apart = 1, blocks = 0;  // `apart` times as many there are: for each tile of all heads, or for any
  int64_t items = 0;              // that as many blocks go through
  int64_t share = 1, parts = 1;   // parts: items of a token tile
  int64_t sums = 1;

  int64_t floats(int64_t cols) const { return apart * blocks * sums * cols; }
};

struct GradPlan {
  GradBlocks q, k;
};

// The same on every GPU, since sums depend on it. `at_once`: how many blocks there are, about.
GradPlan make_rotary_grad_plan(const QkNormRotaryBackward& p, const HeadTiles& q, const HeadTiles& k, int64_t at_once);

// That run at once.
constexpr int64_t kRotaryGradBlocks = 4 * kMultiprocessors;

// A plan whose sums the workspace has room for, and where in it those of the queries and of the keys begin.
struct GradPartials {
  GradPlan plan;
  float *q, *k;
};

cudaError_t make_partials(const QkNormRotaryBackward& p, const HeadTiles& q, const HeadTiles& k,
                          GradPartials& partials);

}  // namespace jaxnorm::cuda
