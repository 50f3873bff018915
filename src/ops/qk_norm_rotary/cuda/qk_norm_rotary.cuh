// Queries and keys, normalised and turned, and values that lie beside them.
//
// A block has a tile of neighbouring heads and tokens, for which it computes cosines and sines once: the engine's loop
// knows of no rows that share more than weights. Each thread group has the same head of a few tokens under way at once.
#pragma once

#include "engine/cuda/weight.cuh"
#include "ops/qk_norm_rotary/cuda/rotary.cuh"
#include "ops/shared/cuda/stats.cuh"

namespace jaxnorm::cuda {

// In place of statistics, where there is no norm.
struct NoStats {
  struct Statistics {
    __device__ float x_hat(float x) const { return x; }
  };
};

// The blocks of q come before those of k, and these before those of v.
struct RotaryLaunch {
  PairShape shape;
  TurnsLaunch turns;
  TilesLaunch q, k;
  SmallDivisor inner;
  int q_blocks, qk_blocks;
  float reciprocal_cols;
};

// That run at once, with one row under way in each thread group.
constexpr int64_t kFewBlocks = 4 * kMultiprocessors;

template <typename Stats>
constexpr bool kHasNorm = !std::is_same_v<Stats, NoStats>;

// One row, from its fragment to memory.
template <typename X, typename Stats, typename Tile, typename Group>
__device__ __forceinline__ void write_turned_row(const QkNormRotaryForward& p, const RotaryLaunch& launch,
                                                 const Heads& of, const Group& group, const PairRow<X, Tile>& x,
                                                 const FloatWeight<Tile>& factor, const float* turns, int row,
                                                 bool is_there) {
  constexpr int N = Tile::N;
  typename Stats::Statistics s;
  if constexpr (kHasNorm<Stats>) {
    s = Stats::finish(p, Stats::template warp_part<Tile>(x, group, static_cast<float>(group.end)),
                      launch.reciprocal_cols);
    if (is_there && group.rank == 0) Stats::write(of, s, row);
  }
  float h[Tile::VECTORS][N];
  for_each_vector<Tile>(group, [&](int vec, int col, int remaining) {
    x.get(vec, col, remaining, h[vec]);
    if constexpr (kHasNorm<Stats>)
#pragma unroll
      for (int i = 0; i < N; ++i) h[vec][i] = s.x_hat(h[vec][i]) * factor[vec][i];
  });
#pragma unroll
  for (int vec = 0; vec < Tile::VECTORS; vec += 2)
    turn_unit(launch.turns, turns, group, group.rank + vec / 2 * Tile::LANES, h[vec], h[vec + 1]);
  X* const y = static_cast<X*>(of.y.data) + int64_t{row} * group.end;
  for_each_vector<Tile>(group, [&](int vec, int col, int remaining) {
    store<Tile::ALIGNED>(y + col, pack<X>(h[vec]), is_there ? remaining : 0);
  });
}

// ROWS: how many tokens a thread group has under way.
template <typename X, typename Stats, typename Tile, int ROWS>
__global__ void __launch_bounds__(kRotaryThreads, ROWS > 1 ? 7 : 1)
    rotary_kernel(const __grid_constant__ QkNormRotaryForward p, const __grid_constant__ RotaryLaunch launch) {
  int index = static_cast<int>(gridDim.x - 1 - blockIdx.x);  // see RowsLaunch::backwards
  if (index >= launch.qk_blocks) {
    copy_values<X, Tile, ROWS>(p.v, launch.k, launch.turns.tokens, launch.shape.cols, index - launch.qk_blocks);
    return;
  }
  const bool is_q = index < launch.q_blocks;
  if (!is_q) index -= launch.q_blocks;
  const Heads of = is_q ? p.q : p.k;
  const TilesLaunch tiles = is_q ? launch.q : launch.k;
  const PairGroup<Tile::LANES> group(launch.shape);
  const int token_tile = tiles.count.quotient(index), first = token_tile * ROWS * tiles.tile_tokens;
  const PlaceOfRow place(tiles, index - token_tile * tiles.count.value, group.place);

  const int angles = ROWS * tiles.tile_tokens;
  // Only where `inner` is 1 there are more.
  const int y_rows = static_cast<int>(of.y_rows), x_more = static_cast<int>(of.x_rows) - y_rows;
  const AngleSource source = launch.turns.look_up(angles, [&](int i) { return first + i; });
  PairRow<X, Tile> x[ROWS];
  int row[ROWS];  // of y
  bool is_there[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int token = first + r * tiles.tile_tokens + place.token_of_tile;
    is_there[r] = token < launch.turns.tokens && place.head < tiles.heads;
    row[r] = first_row_of(token, y_rows, launch.inner) + place.head * launch.inner.value;
    const X* of_x = static_cast<const X*>(of.x.data) + int64_t{token * x_more} * group.end;
    hide(of_x);
    x[r].read(group, of_x + int64_t{row[r]} * group.end, is_there[r]);
  }
  const bool has_scale = of.scale.data && place.head < tiles.heads;
  FloatWeight<Tile> factor(group,
                           has_scale ? from(of.scale, of.has_scale_per_head ? place.head * p.cols : 0) : Input{});
  float* const table = reinterpret_cast<float*>(dynamic_shared());
  launch.turns.fill(table, angles, source);
  factor.arrive(p.scale_offset, 1.0f);
  __syncthreads();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float* const turns = launch.turns.of_token(table, r * tiles.tile_tokens + place.token_of_tile);
    write_turned_row<X, Stats, Tile>(p, launch, of, group, x[r], factor, turns, row[r], is_there[r]);
  }
}

// Calls f with the Stats of a norm.
template <typename F>
cudaError_t with_head_stats(HeadNorm norm, F f) {
  if (norm == HeadNorm::none) return f(NoStats{});
  return norm == HeadNorm::rms ? f(MeanSquare{}) : f(MeanVariance{});
}

template <typename X, typename Tile, int ROWS>
cudaError_t launch_rotary_rows(const QkNormRotaryForward& p, const RotaryTiling& tiling, const HeadTiles& q,
                               const HeadTiles& k, bool back, cudaStream_t stream) {
  const int64_t of_q = q.blocks(p.tokens, ROWS), of_k = k.blocks(p.tokens, ROWS);
  const int64_t all = of_q + of_k + (p.v.y ? of_k : 0);
  const RotaryLaunch launch{make_pair_shape(tiling, p.cols, p.rotation),
                            TurnsLaunch(p.rotation, p.tokens, back),
                            TilesLaunch(q, p.q.heads),
                            TilesLaunch(k, p.k.heads),
                            SmallDivisor(p.inner),
                            static_cast<int>(of_q),
                            static_cast<int>(of_q + of_k),
                            1.0f / static_cast<float>(p.cols)};
  if (all == 0) return cudaSuccess;
  const int64_t shared = int64_t{4} * ROWS * std::max(q.tokens, k.tokens) * launch.turns.floats_of_token();
  return with_head_stats(p.norm, [&](auto stats) {
    return launch_rotary(rotary_kernel<X, decltype(stats), Tile, ROWS>, tiling, all, shared, stream, p, launch);
  });
}

// `back`: turned by the negative angles, as is the gradient where there is no norm.
template <typename X>
cudaError_t run_qk_norm_rotary(const QkNormRotaryForward& p, bool back, cudaStream_t stream) {
  if (!has_few_rows(p)) return cudaErrorInvalidValue;
  const RotaryTiling tiling = make_rotary_tiling(kDtype<X>, p.cols, p.rotation.dim, p.rotation.interleaved);
  const bool aligned = are_aligned_for<X>(tiling, p.q.x, p.k.x, p.q.y, p.k.y, p.v.x, p.v.y, p.q.scale, p.k.scale);
  const HeadTiles q = make_head_tiles(p.q.y ? p.q.heads : 0, p.inner, tiling.groups());
  const HeadTiles k = make_head_tiles(p.k.y ? p.k.heads : 0, p.inner, tiling.groups());
  return with_pair_tiling<X>(tiling, aligned, [&](auto tile) {
    using Tile = decltype(tile);
    constexpr int ROWS = Tile::ALIGNED && (Tile::VECTORS == 2 || Tile::VECTORS * Tile::N <= 8) ? 2 : 1;
    // Few rows are sooner done by more blocks.
    if constexpr (ROWS > 1 && Tile::N == kVector<X>)
      if (q.blocks(p.tokens, 1) + k.blocks(p.tokens, 1) <= kFewBlocks)
        return launch_rotary_rows<X, Tile, 1>(p, tiling, q, k, back, stream);
    return launch_rotary_rows<X, Tile, ROWS>(p, tiling, q, k, back, stream);
  });
}

}  // namespace jaxnorm::cuda
