// What the kernels of rotary embedding share: how a thread group has a row of pairs, the tiles of heads and tokens, and
// what turns the rows of a tile.
#pragma once

#include <climits>

#include "engine/cuda/launch.cuh"
#include "engine/cuda/tiling.cuh"
#include "ops/qk_norm_rotary/cuda/plan.h"

namespace jaxnorm::cuda {

// How a thread group divides a row whose columns go by pairs: in units of two vectors, so that the thread that has a
// column has the other one of its pair as well. The engine's tiling would have that of some rows only, those of which
// the pairs lie half a row apart and fill every thread.
struct PairShape {
  int cols;
  int units;            // of a row
  int half;             // of the columns before 2 * half, each is a pair with the one that lies `half` beyond it
  int spread;           // of other columns: from the first vector of a unit to the second
  bool are_neighbours;  // with vectors of one element: pairs are neighbours, and do not lie `half` apart
};

// N: elements of a vector. ALIGNED: as for `load`.
template <typename X, int LANES_, int UNITS, int N_, bool ALIGNED_>
struct PairTiling {
  static constexpr int LANES = LANES_, N = N_, VECTORS = 2 * UNITS;
  static constexpr bool ALIGNED = ALIGNED_ || N == 1, PIPELINED = ALIGNED, STREAMED = false, UNALIGNED = false;
};

// LANES neighbouring threads of a warp, with the interface of ThreadGroup as far as these rows need it.
template <int LANES>
struct PairGroup {
  static constexpr bool kSpansWarps = false, kSpansBlocks = false;

  const PairShape& shape;
  const int rank, place;  // this thread's place in it, and its own in the block
  const int end;          // columns

  __device__ explicit PairGroup(const PairShape& shape)
      : shape(shape), rank(threadIdx.x % LANES), place(threadIdx.x / LANES), end(shape.cols) {}

  template <typename T>
  __device__ T warp_sum(T value) const {
    return group_sum<LANES>(value);
  }

  // The first column of a unit's first or second vector.
  template <int N>
  __device__ int column(int unit, int which) const {
    const int first = unit * N;
    if (first >= shape.half) return shape.half + first + which * shape.spread;
    if (N == 1 && shape.are_neighbours) return 2 * unit + which;
    return first + which * shape.half;
  }
};

// As that of the engine's tiling.
template <typename Tile, int LANES, typename F>
__device__ void for_each_vector(const PairGroup<LANES>& group, F f) {
#pragma unroll
  for (int vec = 0; vec < Tile::VECTORS; ++vec) {
    const int unit = group.rank + vec / 2 * LANES, col = group.template column<Tile::N>(unit, vec % 2);
    f(vec, col, unit < group.shape.units ? group.shape.cols - col : 0);
  }
}

// A thread's fragment of a row.
template <typename X, typename Tile>
struct PairRow {
  Packed<X, Tile::N> packed[Tile::VECTORS];

  // A row that is not there is of zeros.
  template <typename Group>
  __device__ void read(const Group& group, const X* row, bool is_there) {
    for_each_vector<Tile>(group, [&](int vec, int col, int remaining) {
      if constexpr (Tile::ALIGNED && Tile::N > 1) {
        packed[vec] = load_now<Tile::N>(row + col, is_there ? remaining : 0);
      } else {
        packed[vec] = load<Tile::ALIGNED, Tile::N>(row + col, is_there ? remaining : 0);
      }
    });
  }

  __device__ void get(int vec, int, int, float (&to)[Tile::N]) const { unpack(packed[vec], to); }
};

// Where the angle of one token comes from, for the lane that looked it up, and a thread's first frequency.
struct AngleSource {
  int row = -1;  // of positions, or of tables; negative: there is no such token
  float position = 0, frequency = 0;
};

// RowMapLaunch of fewer rows.
struct TokenMap {
  SmallDivisor count, inner;

  explicit TokenMap(const RowMap& map) : count(map.count), inner(map.inner) {}

  __device__ int of_token(int token) const {
    if (count.value == 1) return 0;
    return count.remainder(inner.value == 1 ? token : inner.quotient(token));
  }
};

// Cosines and sines of some tokens, in shared memory. Threads that are neighbours have neighbouring pairs, each the
// same ones of all its tokens.
struct TurnsLaunch {
  const float *cos, *sin, *positions, *frequencies;
  TokenMap outer, inner;
  int tokens;
  int dim, pairs;
  int shift;   // 2^shift neighbouring threads have the pairs of a token
  int stride;  // floats from a token's cosines to its sines, and from these to the next one's cosines
  float sign;
  bool interleaved;

  // `back`: turned by the negative angles.
  TurnsLaunch(const Rotation& r, int64_t tokens, bool back)
      : cos(r.cos),
        sin(r.sin),
        positions(r.positions),
        frequencies(r.frequencies),
        outer(r.token_rows.outer),
        inner(r.token_rows.inner),
        tokens(static_cast<int>(tokens)),
        dim(static_cast<int>(r.dim)),
        pairs(static_cast<int>(r.dim / 2)),
        shift(0),
        stride((pairs + 3) / 4 * 4),
        sign(back ? -1.0f : 1.0f),
        interleaved(r.interleaved) {
    while (1 << shift < std::min(pairs, kRotaryThreads)) ++shift;
  }

  int floats_of_token() const { return 2 * stride; }
  __device__ const float* of_token(const float* table, int i) const { return table + 2 * i * stride; }

  // Looks up the tokens whose angles this warp computes, of `count` tokens, the i-th of which is token_of(i): a lane
  // for each. They may be on their way while other things are done.
  template <typename F>
  __device__ AngleSource look_up(int count, F token_of) const {
    const int lane = threadIdx.x % kWarp, in_warp = min(shift, kLogWarp), tokens_of_warp = kLogWarp - in_warp;
    const int first = threadIdx.x - lane + ((lane & ((1 << tokens_of_warp) - 1)) << in_warp);
    const int place = (lane >> tokens_of_warp) * (kRotaryThreads >> shift) + (first >> shift);
    const int token = place < count ? token_of(place) : tokens;
    AngleSource source;
    if (token < tokens) source.row = outer.of_token(token) * inner.count.value + inner.of_token(token);
    if (!positions) return source;
    if (token < tokens) source.position = __ldg(positions + source.row);
    if (first_pair() < pairs) source.frequency = __ldg(frequencies + first_pair());
    return source;
  }

  // By the whole block, of tokens that it has looked up. The table is there once it has met.
  __device__ void fill(float* table, int count, const AngleSource& own) const {
    if (positions) {
      for_each_round(count, [&](int lane, int place) {
        const float position = __shfl_sync(0xffffffffu, own.position, lane);
        for_each_pair(table, count, place, [&](int pair, float* to) {
          float sin_of, cos_of;
          const float frequency = pair < kRotaryThreads ? own.frequency : __ldg(frequencies + pair);
          sincosf(position * frequency, &sin_of, &cos_of);
          to[0] = cos_of;
          to[stride] = sign * sin_of;
        });
      });
    } else {
      for_each_round(count, [&](int lane, int place) {
        const int row = __shfl_sync(0xffffffffu, own.row, lane);
        for_each_pair(table, count, place, [&](int pair, float* to) {
          const int64_t at = int64_t{row} * pairs + pair;
          to[0] = row >= 0 ? __ldg(cos + at) : 0.0f;
          to[stride] = row >= 0 ? sign * __ldg(sin + at) : 0.0f;
        });
      });
    }
  }

 private:
  static constexpr int kLogWarp = 5;
  static_assert(1 << kLogWarp == kWarp);

  __device__ int first_pair() const { return static_cast<int>(threadIdx.x) & ((1 << shift) - 1); }

  // Of the tokens of this thread, one after the other: which lane has looked up each, and its place in the table.
  template <typename F>
  __device__ void for_each_round(int count, F f) const {
    const int in_warp = min(shift, kLogWarp);
    int lane = static_cast<int>(threadIdx.x % kWarp) >> in_warp, place = static_cast<int>(threadIdx.x) >> shift;
#pragma unroll 1
    for (int round = 0; round < count; round += kRotaryThreads >> shift) {
      f(lane, place);
      lane += kWarp >> in_warp;
      place += kRotaryThreads >> shift;
    }
  }

  // The pairs that this thread has of a token, if there is one.
  template <typename F>
  __device__ void for_each_pair(float* table, int count, int place, F f) const {
#pragma unroll 1
    for (int pair = first_pair(); place < count && pair < pairs; pair += kRotaryThreads)
      f(pair, table + 2 * place * stride + pair);
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
  int tile_tokens, token_shift;  // the same of these
  SmallDivisor count;            // tiles of all heads

  TilesLaunch(const HeadTiles& tiles, int64_t heads)
      : heads(static_cast<int>(heads)),
        tile_heads(tiles.heads),
        shift(0),
        tile_tokens(tiles.tokens),
        token_shift(0),
        count(std::max<int64_t>(1, tiles.count)) {
    while (1 << shift < tile_heads) ++shift;
    while (1 << token_shift < tile_tokens) ++token_shift;
  }
};

inline int64_t most_rows(const Heads& of) { return std::max(of.x_rows, of.y_rows); }
inline int64_t most_rows(const HeadsGrad& of) { return of.x_rows; }

// Rows are counted by int: more of them a GPU has no room for, but of a few elements.
template <typename Call>
bool has_few_rows(const Call& p) {
  return std::max(most_rows(p.q), most_rows(p.k)) <= INT_MAX / std::max<int64_t>(1, p.tokens);
}

// Which row of the array a thread group has in a tile, if there is one.
struct PlaceOfRow {
  int head, token_of_tile;

  __device__ PlaceOfRow(const TilesLaunch& tiles, int head_tile, int group)
      : head(head_tile * tiles.tile_heads + (group & (tiles.tile_heads - 1))), token_of_tile(group >> tiles.shift) {}
};

// The row of a token's first head: the next one's is `inner` rows further.
__device__ inline int first_row_of(int token, int rows, const SmallDivisor& inner) {
  if (inner.value == 1) return token * rows;
  const int outer = inner.quotient(token);
  return outer * (rows - 1) * inner.value + token;
}

// By the `index`-th block for v, which has ROWS of k's tiles of tokens. Without v all rows are zero. Its columns are in
// no pairs.
template <typename X, typename Tile, int ROWS>
__device__ __forceinline__ void copy_values(const Values& v, const TilesLaunch& tiles, int tokens, int cols,
                                            int index) {
  const PairShape shape{cols, cols, 0, Tile::VECTORS / 2 * Tile::LANES * Tile::N, false};
  const PairGroup<Tile::LANES> group(shape);
  const int token_tile = tiles.count.quotient(index);
  const PlaceOfRow place(tiles, index - token_tile * tiles.count.value, group.place);
  const int first = token_tile * ROWS * tiles.tile_tokens + place.token_of_tile;
  const auto is_there = [&](int token) { return token < tokens && place.head < tiles.heads; };
  const auto at = [&](int token, int64_t rows) { return (token * rows + place.head) * group.end; };
  PairRow<X, Tile> x[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int token = first + r * tiles.tile_tokens;
    x[r].read(group, static_cast<const X*>(v.x.data) + at(token, v.x_rows), is_there(token) && v.x.data);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int token = first + r * tiles.tile_tokens;
    X* const y = static_cast<X*>(v.y.data) + at(token, v.y_rows);
    for_each_vector<Tile>(group, [&](int vec, int col, int remaining) {
      store<Tile::ALIGNED>(y + col, x[r].packed[vec], is_there(token) ? remaining : 0);
    });
  }
}

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
  const auto with = [&](auto lanes, auto units, auto n) {
    constexpr int LANES = decltype(lanes)::value, UNITS = decltype(units)::value, OWN_N = decltype(n)::value;
    return aligned ? f(PairTiling<X, LANES, UNITS, OWN_N, true>{}) : f(PairTiling<X, LANES, UNITS, OWN_N, false>{});
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 4> four;
  constexpr std::integral_constant<int, 8> eight;
  constexpr std::integral_constant<int, kWarp / 2> half;
  constexpr std::integral_constant<int, kWarp> whole;
  constexpr std::integral_constant<int, N> vector;
  if (tiling.vector == 1)
    return tiling.units > 2 ? f(PairTiling<X, kWarp, 8, 1, true>{}) : f(PairTiling<X, kWarp, 2, 1, true>{});
  if (tiling.vector == 2) return tiling.units > 2 ? with(whole, four, two) : with(half, two, two);
  if (tiling.lanes == 4) return with(four, one, vector);
  if (tiling.lanes == 8) return with(eight, one, vector);
  if (tiling.lanes == 16) return with(half, one, vector);
  constexpr std::integral_constant<int, static_cast<int>(kRotaryCols) / N / 2 / kWarp> most;
  if constexpr (most > 1)
    if (tiling.units > 1) return with(whole, most, vector);
  return with(whole, one, vector);
}

// Whether all arrays are aligned to the vectors of rows of X.
template <typename X, typename... Arrays>
bool are_aligned_for(const RotaryTiling& tiling, const Arrays&... arrays) {
  return tiling.vector == kVector<X> ? are_aligned<kVector<X>>(arrays...) : are_aligned<2>(arrays...);
}

// The launch of so many blocks, with shared memory.
template <typename... Params, typename... Args>
cudaError_t launch_rotary(void (*kernel)(Params...), const RotaryTiling& tiling, int64_t blocks, int64_t shared_bytes,
                          cudaStream_t stream, const Args&... args) {
  const Plan plan{tiling.lanes, 2 * tiling.units, tiling.groups(), 1};
  return launch_groups(kernel, plan, blocks, static_cast<int>(shared_bytes), stream, args...);
}

}  // namespace jaxnorm::cuda
