#include "cuda/ops/rotary_plan.h"

#include <algorithm>

#include "cuda/engine/grad_schedule.h"
#include "cuda/ops.h"

namespace jaxnorm::cuda {
namespace {

static_assert(kRotaryGradBlocks % kMultiprocessors == 0);

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

RotaryTiling make_rotary_tiling(Dtype x, int64_t cols, int64_t dim, bool interleaved) {
  const int vector = vector_of(x);
  if (cols % vector != 0 || (interleaved ? dim : dim / 2) % vector != 0) {
    return {1, kWarp, static_cast<int>(kRotaryCols) / 2 / kWarp};
  }
  const int units = static_cast<int>(ceil_div(cols / vector, 2));
  int lanes = 4;
  while (lanes < kWarp && lanes < units) lanes *= 2;
  return {vector, lanes, static_cast<int>(ceil_div(units, lanes))};
}

HeadTiles make_head_tiles(int64_t heads, int64_t inner, int groups) {
  HeadTiles best;
  // Where the tokens of a head are neighbours, a tile has some of them.
  const int most = inner > 1 ? std::max(1, groups / 2) : groups;
  for (int of_tile = 1; of_tile <= most; of_tile *= 2) {
    const auto cost = [](const HeadTiles& tiles) { return tiles.count * (tiles.heads + 2); };
    const HeadTiles tiles{of_tile, groups / of_tile, ceil_div(heads, of_tile)};
    if (of_tile == 1 || cost(tiles) < cost(best)) best = tiles;
  }
  return best;
}

GradPlan make_rotary_grad_plan(const QkNormRotaryBackward& p, const HeadTiles& q, const HeadTiles& k, int64_t at_once) {
  // Tiles of q and of k to the tokens of one of q and one of k.
  const int64_t of_q = q.count * k.tokens, of_k = k.count * q.tokens, of_both = std::max<int64_t>(1, of_q + of_k);
  const auto blocks_of = [&](const HeadsGrad& of, const HeadTiles& tiles, int64_t share) {
    GradBlocks blocks;
    if (tiles.count == 0 || p.tokens == 0) return blocks;
    blocks.tiles = tiles.of_tokens(p.tokens) * (of.has_scale_per_head ? 1 : tiles.count);
    blocks.apart = of.has_scale_per_head ? tiles.count : 1;
    blocks.sums = of.has_scale_per_head ? tiles.heads : 1;
    blocks.blocks = std::clamp<int64_t>(at_once * share / of_both / blocks.apart, 1, blocks.tiles);
    return blocks;
  };
  return {blocks_of(p.q, q, of_q), blocks_of(p.k, k, of_k)};
}

WorkspaceSize qk_norm_rotary_backward_workspace(const WorkspaceQuery& query) {
  if (query.weights == 0) return {};
  const int64_t heads = query.weight_rows.count;
  if (heads == 1) return {0, kRotaryGradBlocks * query.cols};
  // So many heads has a tile at most, of rows that vectors divide.
  const int64_t of_tile = make_rotary_tiling(query.dtype, query.cols, 0, true).groups();
  return {0, query.cols * std::max(kRotaryGradBlocks * std::min(2 * heads, of_tile), 2 * query.weights * heads)};
}

}  // namespace jaxnorm::cuda
