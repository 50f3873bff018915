#include "ops/qk_norm_rotary/cuda/plan.h"

#include <algorithm>
#include <cmath>

namespace jaxnorm::cuda {

static_assert(kRotaryGradBlocks % kMultiprocessors == 0);

RotaryTiling make_rotary_tiling(Dtype x, int64_t cols, int64_t dim, bool interleaved) {
  const int vector = vector_of(x);
  const auto divide = [&](int elements) {
    return cols % elements == 0 && (interleaved ? dim : dim / 2) % elements == 0;
  };
  const bool is_short = cols <= kShortRotaryCols;
  if (!divide(vector)) {
    if (divide(2)) return is_short ? RotaryTiling{2, kWarp / 2, 2} : RotaryTiling{2, kWarp, 4};
    return {1, kWarp, is_short ? 2 : 8};
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
  // What an item takes, in quarters of what a tile does: angles as many as threads take one.
  const auto cost_of_item = [&](const HeadTiles& tiles, int64_t share) {
    return 4 * share + ceil_div(tiles.tokens * p.rotation.dim / 2, kRotaryThreads);
  };
  const auto cost_of = [&](const HeadsGrad& of, const HeadTiles& tiles) {
    const int64_t share = of.has_scale_per_head ? 1 : tiles.count;
    return share == 0 ? 0 : tiles.of_tokens(p.tokens) * (tiles.count / share) * cost_of_item(tiles, share);
  };
  const auto blocks_of = [&](const HeadsGrad& of, const HeadTiles& tiles, int64_t most) {
    GradBlocks blocks;
    if (tiles.count == 0 || p.tokens == 0) return blocks;
    const int64_t token_tiles = tiles.of_tokens(p.tokens);
    const auto rounds = [&](int64_t items) { return ceil_div(items, most); };
    if (of.has_scale_per_head) {
      blocks.apart = tiles.count;
      blocks.sums = tiles.heads;
      most = std::max<int64_t>(1, most / tiles.count);
    } else {
      // The larger an item, the less angles; the smaller, the more evenly blocks share out what there is.
      const auto cost = [&](int64_t share) {
        return rounds(token_tiles * ceil_div(tiles.count, share)) * cost_of_item(tiles, share);
      };
      blocks.share = tiles.count;
      for (int64_t share = tiles.count; share > 1;)
        if (share = ceil_div(share, 2); cost(share) < cost(blocks.share)) blocks.share = share;
      blocks.parts = ceil_div(tiles.count, blocks.share);
    }
    blocks.items = token_tiles * blocks.parts;
    blocks.blocks = ceil_div(blocks.items, rounds(blocks.items));
    return blocks;
  };
  const int64_t of_q = cost_of(p.q, q), of_k = cost_of(p.k, k), of_both = std::max<int64_t>(1, of_q + of_k);
  const double share = static_cast<double>(of_q) / static_cast<double>(of_both);
  const int64_t most_of_q = std::min<int64_t>(std::llround(static_cast<double>(at_once) * share), at_once - (of_k > 0));
  const auto plan_of = [&](int64_t most) {
    const GradBlocks first = blocks_of(p.q, q, most);
    return GradPlan{first, blocks_of(p.k, k, std::max<int64_t>(1, at_once - first.apart * first.blocks))};
  };
  const auto rounds_of = [](const GradBlocks& blocks) {
    return ceil_div(blocks.items, std::max<int64_t>(1, blocks.blocks));
  };
  const auto time_of = [&](const GradPlan& plan) {
    return std::max(rounds_of(plan.q) * cost_of_item(q, plan.q.share),
                    rounds_of(plan.k) * cost_of_item(k, plan.k.share));
  };
  GradPlan plan = plan_of(std::max<int64_t>(1, most_of_q));
  // With a round less, q may take blocks that k would not miss.
  if (const int64_t fewer = rounds_of(plan.q) - 1; fewer > 0 && of_k > 0) {
    const int64_t more = plan.q.apart * ceil_div(plan.q.items, fewer);
    if (const GradPlan other = plan_of(more); more < at_once && time_of(other) < time_of(plan)) plan = other;
  }
  return plan;
}

WorkspaceSize qk_norm_rotary_grad_workspace(const WorkspaceQuery& query) {
  if (query.weights == 0) return {};
  const int64_t heads = query.weight_rows.count;
  if (heads == 1) return {0, kRotaryGradBlocks * query.cols};
  // So many heads has a tile at most, of rows that vectors divide.
  const int64_t of_tile = make_rotary_tiling(query.dtype, query.cols, 0, true).groups();
  return {0, query.cols * std::max(kRotaryGradBlocks * std::min(2 * heads, of_tile), 2 * query.weights * heads)};
}

cudaError_t make_partials(const QkNormRotaryBackward& p, const HeadTiles& q, const HeadTiles& k,
                          GradPartials& partials) {
  for (int64_t at_once = kRotaryGradBlocks; at_once > 0; at_once /= 2) {
    partials.plan = make_rotary_grad_plan(p, q, k, at_once);
    const int64_t of_q = p.q.dscale ? partials.plan.q.floats(p.cols) : 0;
    const int64_t of_k = p.k.dscale ? partials.plan.k.floats(p.cols) : 0;
    partials.q = p.workspace.data;
    partials.k = p.workspace.data + of_q;
    if (of_q + of_k <= p.workspace.floats) return cudaSuccess;
  }
  return cudaErrorMemoryAllocation;
}

}  // namespace jaxnorm::cuda
