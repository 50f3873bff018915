// What is compiled once for each instruction set, as a table to choose by at run time.
#pragma once

#include <cstdint>

#include "cpu/ops/group_tile.h"
#include "ops/add_norm.h"
#include "ops/cross_entropy.h"
#include "ops/gated_norm.h"
#include "ops/gated_norm_quantized.h"
#include "ops/group_norm.h"
#include "ops/norm.h"
#include "ops/qk_norm_rotary.h"
#include "ops/quantized_norm.h"
#include "ops/sandwich_norm.h"
#include "ops/softmax.h"

namespace jaxnorm::cpu {

// Room for one row at a time, or for the short ones that go together.
constexpr int64_t kShortFloats = 1 << 11;
inline int64_t floats_of_rows(int64_t cols) { return cols > kShortFloats ? cols : kShortFloats; }

// In the ops that these are given, scale, bias and smooth are f32 and the scale has its offset in it: widen() makes
// them so. They work on rows [begin, end); `traffic` is how many bytes all rows of the call read and write. Gradients
// of weights are added to f32 sums of the weights' shape; null: they are not wanted. `products`, `row` and `kept` are
// room for rows.
struct Kernels {
  const char* isa;

  // With an addition, which is then done first, p.x is its sum.
  void (*norm)(const NormForward& p, const Addition* addition, int64_t begin, int64_t end, int64_t traffic);
  void (*quantized_norm)(const QuantizedNormForward& p, const Addition* addition, int64_t begin, int64_t end,
                         int64_t traffic);
  void (*gated_norm)(const GatedNormForward& p, int64_t begin, int64_t end, float* products, int64_t traffic);
  void (*gated_norm_quantized)(const GatedNormQuantizedForward& p, int64_t begin, int64_t end, float* products,
                               float* row, int64_t traffic);
  void (*sandwich_norm)(const SandwichNormForward& p, int64_t begin, int64_t end, int64_t traffic);

  void (*norm_grad)(const NormBackward& p, int64_t begin, int64_t end, float* dscale, float* dbias, int64_t traffic);
  void (*gated_norm_grad)(const GatedNormBackward& p, int64_t begin, int64_t end, float* dscale, float* kept,
                          int64_t traffic);
  void (*sandwich_norm_grad)(const SandwichNormBackward& p, int64_t begin, int64_t end, float* dpost_scale,
                             float* dscale, float* row, int64_t traffic);

  void (*softmax)(const SoftmaxForward& p, int64_t begin, int64_t end, float* kept, int64_t traffic);
  void (*softmax_grad)(const SoftmaxBackward& p, int64_t begin, int64_t end, int64_t traffic);
  void (*log_softmax_grad)(const LogSoftmaxBackward& p, int64_t begin, int64_t end, int64_t traffic);
  void (*cross_entropy)(const CrossEntropyForward& p, int64_t begin, int64_t end, int64_t traffic);
  void (*cross_entropy_grad)(const CrossEntropyBackward& p, int64_t begin, int64_t end, int64_t traffic);

  // Of all heads of tokens [begin, end).
  void (*qk_norm_rotary)(const QkNormRotaryForward& p, int64_t begin, int64_t end, int64_t traffic);
  void (*qk_norm_rotary_grad)(const QkNormRotaryBackward& p, int64_t begin, int64_t end, float* dq_scale,
                              float* dk_scale, int64_t traffic);

  // Of groups [begin, end) without positions, with weights that are the same for all examples.
  void (*group_norm_rows)(const GroupNormForward& p, int64_t begin, int64_t end, int64_t traffic);
  // Of a tile.
  void (*group_moments)(Input x, const GroupTile& tile, const GroupMoments& moments);
  void (*group_norm)(const GroupNormForward& p, const GroupTile& tile, const GroupColumns& columns, int64_t traffic);
  void (*group_norm_sums)(const GroupNormBackward& p, const GroupTile& tile, const GroupColumns& columns,
                          const GroupGradSums& sums);
  void (*group_norm_grad)(const GroupNormBackward& p, const GroupTile& tile, const GroupColumns& columns,
                          int64_t traffic);

  // Of `count` neighbours in an array: adds `from` to `into`; writes `from`; writes from + offset.
  void (*add)(const float* from, float* into, int64_t count);
  void (*cast)(const float* from, Output into, int64_t count);
  void (*widen)(Input from, float offset, float* into, int64_t count);
};

extern const Kernels baseline, avx2, avx512;

// Those that this processor runs.
const Kernels& kernels();

}  // namespace jaxnorm::cpu
