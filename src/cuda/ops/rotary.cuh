// What the kernels of rotary embedding share: the tiles of heads and tokens, and what turns the rows of a tile.
#pragma once

#include "cuda/engine/pair_tiling.cuh"
#include "cuda/engine/row_map.cuh"
#include "cuda/ops/rotary_plan.h"

namespace jaxnorm::cuda {

// Cosines and sines of some tokens, in shared memory.
struct TurnsLaunch {
  const float *cos, *sin, *positions, *frequencies;
  RowMapLaunch outer, inner;
  int64_t inner_count, tokens;
  int dim, pairs;
  int stride;  // floats from a token's cosines to its sines, and from these to the next one's cosines
  float reciprocal_pairs, sign;
  bool interleaved;

  // `back`: turned by the negative angles.
  TurnsLaunch(const Rotation& r, int64_t tokens, bool back)
      : cos(r.cos),
        sin(r.sin),
        positions(r.positions),
        frequencies(r.frequencies),
        outer(r.token_rows.outer),
        inner(r.token_rows.inner),
        inner_count(r.token_rows.inner.count),
        tokens(tokens),
        dim(static_cast<int>(r.dim)),
        pairs(static_cast<int>(r.dim / 2)),
        stride((pairs + 3) / 4 * 4),
        reciprocal_pairs(1.0f / static_cast<float>(pairs)),
        sign(back ? -1.0f : 1.0f),
        interleaved(r.interleaved) {}

  int floats_of_token() const { return 2 * stride; }
  __device__ const float* of_token(const float* table, int i) const { return table + 2 * i * stride; }

  // By the whole block: those of `count` tokens, the i-th of which is token_of(i). They are there once it has met.
  template <typename F>
  __device__ void fill(float* table, int count, F token_of) const {
    for (int i = threadIdx.x; i < count * pairs; i += kRotaryThreads) {
      // Exact: the quotient of so small numbers is further from the next integer than it can be wrong.
      const int place = static_cast<int>((static_cast<float>(i) + 0.5f) * reciprocal_pairs), pair = i - place * pairs;
      const int64_t token = token_of(place);
      const int64_t row = outer.of_row(token) * inner_count + inner.of_row(token);
      float sin_of = 0, cos_of = 0;
      if (token >= tokens) {
        // What is not there is turned too.
      } else if (positions) {
        sincosf(__ldg(positions + row) * __ldg(frequencies + pair), &sin_of, &cos_of);
      } else {
        cos_of = __ldg(cos + row * pairs + pair);
        sin_of = __ldg(sin + row * pairs + pair);
      }
      float* const to = table + 2 * place * stride + pair;
      to[0] = cos_of;
      to[stride] = sign * sin_of;
    }
  }
};

__device__ inline void turn(float& a, float& b, float cos, float sin) {
  const float turned = fmaf(a, cos, -(b * sin));
  b = fmaf(b, cos, a * sin);
  a = turned;
}

// Turns a vector whose pairs are neighbours.
template <int N>
__device__ void turn_neighbours(const TurnsLaunch& turns, const float* of_token, int col, float (&v)[N]) {
  if (col >= turns.dim) return;
  float cos[N / 2], sin[N / 2];
  unpack(load_shared<N / 2>(of_token + col / 2), cos);
  unpack(load_shared<N / 2>(of_token + turns.stride + col / 2), sin);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) turn(v[2 * i], v[2 * i + 1], cos[i], sin[i]);
}

// Turns the two vectors of a unit.
template <int N, typename Group>
__device__ void turn_unit(const TurnsLaunch& turns, const float* of_token, const Group& group, int unit, float (&a)[N],
                          float (&b)[N]) {
  if constexpr (N > 1) {
    if (turns.interleaved) {
      turn_neighbours(turns, of_token, group.template column<N>(unit, 0), a);
      turn_neighbours(turns, of_token, group.template column<N>(unit, 1), b);
      return;
    }
  }
  const int first = unit * N;
  if (first >= group.shape.half) return;
  float cos[N], sin[N];
  unpack(load_shared<N>(of_token + first), cos);
  unpack(load_shared<N>(of_token + turns.stride + first), sin);
#pragma unroll
  for (int i = 0; i < N; ++i) turn(a[i], b[i], cos[i], sin[i]);
}

// The tiles of q or of k. `backwards`: see RowsLaunch::backwards.
struct TilesLaunch {
  int heads, tile_heads, shift;  // tile_heads: 2^shift
  int tile_tokens;
  Divisor count;  // tiles of all heads

  TilesLaunch(const HeadTiles& tiles, int64_t heads)
      : heads(static_cast<int>(heads)),
        tile_heads(tiles.heads),
        shift(0),
        tile_tokens(tiles.tokens),
        count(std::max<int64_t>(1, tiles.count)) {
    while (1 << shift < tile_heads) ++shift;
  }
};

// Which row of the array a thread group has in a tile, if there is one.
struct PlaceOfRow {
  int head, token_of_tile;

  __device__ PlaceOfRow(const TilesLaunch& tiles, int head_tile, int group)
      : head(head_tile * tiles.tile_heads + group % tiles.tile_heads), token_of_tile(group >> tiles.shift) {}

  __device__ int64_t row(const TilesLaunch& tiles, const Divisor& inner, int64_t token) const {
    if (inner.value == 1) return token * tiles.heads + head;
    const int64_t outer = inner.quotient(token);
    return (outer * tiles.heads + head) * inner.value + token - outer * inner.value;
  }
};

inline PairShape make_pair_shape(const RotaryTiling& tiling, int64_t cols, const Rotation& rotation) {
  PairShape shape{};
  shape.cols = static_cast<int>(cols);
  shape.units = static_cast<int>((cols / tiling.vector + 1) / 2);
  // Longer vectors have both neighbours of a pair, and lie side by side.
  const bool in_vectors = rotation.interleaved && tiling.vector > 1;
  shape.half = in_vectors ? 0 : static_cast<int>(rotation.dim / 2);
  const int others = (shape.cols - 2 * shape.half) / tiling.vector;
  shape.spread = (others + 1) / 2 * tiling.vector;
  shape.are_neighbours = rotation.interleaved;
  return shape;
}

// Calls f(Tile{}) with the tiling of rows of X. `aligned`: of vectors, whether all arrays are aligned to them.
template <typename X, typename F>
cudaError_t with_pair_tiling(const RotaryTiling& tiling, bool aligned, F f) {
  constexpr int N = kVector<X>;
  const auto with_units = [&](auto lanes, auto units) {
    constexpr int LANES = decltype(lanes)::value, UNITS = decltype(units)::value;
    return aligned ? f(PairTiling<X, LANES, UNITS, N, true>{}) : f(PairTiling<X, LANES, UNITS, N, false>{});
  };
  using One = std::integral_constant<int, 1>;
  if (tiling.vector == 1) {
    constexpr int units = static_cast<int>(kRotaryCols) / 2 / kWarp;
    return f(PairTiling<X, kWarp, units, 1, true>{});
  }
  if (tiling.lanes == 4) return with_units(std::integral_constant<int, 4>{}, One{});
  if (tiling.lanes == 8) return with_units(std::integral_constant<int, 8>{}, One{});
  if (tiling.lanes == 16) return with_units(std::integral_constant<int, 16>{}, One{});
  constexpr int most = static_cast<int>(kRotaryCols) / N / 2 / kWarp;
  if constexpr (most > 1)
    if (tiling.units > 1) return with_units(std::integral_constant<int, kWarp>{}, std::integral_constant<int, most>{});
  return with_units(std::integral_constant<int, kWarp>{}, One{});
}

// The launch of so many blocks, with shared memory.
template <typename... Params, typename... Args>
cudaError_t launch_rotary(void (*kernel)(Params...), const RotaryTiling& tiling, int64_t blocks, int64_t shared_bytes,
                          cudaStream_t stream, const Args&... args) {
  const Plan plan{tiling.lanes, 2 * tiling.units, tiling.groups(), 1};
  return launch_groups(kernel, plan, blocks, static_cast<int>(shared_bytes), stream, args...);
}

}  // namespace jaxnorm::cuda
