// The gradients of queries and keys that were normalised and turned, and of values that lie beside them.
//
// Each block goes through many tiles, as rotary_kernel's has one, with the sums over rows in registers. The rows that
// come next are on their way meanwhile.
#pragma once

#include "engine/cuda/partials.h"
#include "engine/cuda/ptx.cuh"
#include "engine/cuda/weight.cuh"
#include "ops/norm/cuda/grad_row.cuh"
#include "ops/qk_norm_rotary/cuda/rotary.cuh"

namespace jaxnorm::cuda {

// The rows of two arrays that a thread group has next, on their way. Each thread has what it copies for itself, so that
// nobody has to wait for others.

// A row of each array, and of the first one's statistics, which come as `SCALARS` arrays. `row`: which of the second,
// where it lies `further` rows further.
template <typename X, typename Tile, int SCALARS>
struct RowPair {
  PairRow<X, Tile> first, second;
  float scalar[SCALARS];
  int row;
  bool is_there;
};

template <typename X, int SCALARS>
struct RowPairArrays {
  const X *first, *second;
  const float* scalar[SCALARS];
};

// One row, in registers.
template <typename X, typename Tile, int SCALARS>
struct HeldRows {
  static constexpr int kAhead = 1, kSharedBytes = 0;
  RowPair<X, Tile, SCALARS> held;

  __device__ explicit HeldRows(char*) {}

  template <typename Group>
  __device__ __forceinline__ void push(const RowPairArrays<X, SCALARS>& from, const Group& group, int row, int further,
                                       bool is_there) {
    const int64_t at = int64_t{row} * group.end;
    held.row = row + further;
    held.is_there = is_there;
    held.first.read(group, from.first + at, is_there);
    held.second.read(group, from.second + int64_t{further} * group.end + at, is_there);
#pragma unroll
    for (int i = 0; i < SCALARS; ++i) held.scalar[i] = is_there ? __ldg(from.scalar[i] + row) : 0.0f;
  }

  __device__ __forceinline__ RowPair<X, Tile, SCALARS> pop() { return held; }
};

// A few rows, in shared memory. THREADS: of a block.
template <typename X, typename Tile, int SCALARS, int THREADS>
class StagedRows {
  static constexpr int kVectorBytes = Tile::N * sizeof(X), kLastBytes = 16;  // the last word has scalars, and the row
  static constexpr int kStageBytes = (2 * Tile::VECTORS * kVectorBytes + kLastBytes) * THREADS;
  static constexpr int kStages = kStageBytes > 15 << 10 ? 2 : (30 << 10) / kStageBytes;
  static_assert(SCALARS <= 2);

 public:
  static constexpr int kAhead = kStages - 1, kSharedBytes = kStages * kStageBytes;

  __device__ explicit StagedRows(char* shared) : begin_(shared) {}

  template <typename Group>
  __device__ __forceinline__ void push(const RowPairArrays<X, SCALARS>& from, const Group& group, int row, int further,
                                       bool is_there) {
    char* const stage = begin_ + next_ * kStageBytes;
    const int64_t at = int64_t{row} * group.end;
    const X* second = from.second + int64_t{further} * group.end;
    hide(second);  // or the compiler would keep the columns of both arrays
    for_each_vector<Tile>(group, [&](int vec, int col, int remaining) {
      copy_or_clear<kVectorBytes>(vector(stage, 2 * vec), from.first + (at + col), is_there && remaining > 0);
      copy_or_clear<kVectorBytes>(vector(stage, 2 * vec + 1), second + (at + col), is_there && remaining > 0);
    });
    char* const last = last_word(stage);
#pragma unroll
    for (int i = 0; i < SCALARS; ++i) copy_or_clear<4>(last + 4 + 4 * i, from.scalar[i] + row, is_there);
    *reinterpret_cast<int*>(last) = is_there ? row + further : -1;
    commit_copies();
    next_ = next_ == kStages - 1 ? 0 : next_ + 1;
  }

  // The one that was pushed first, once as many were pushed as there may be.
  __device__ __forceinline__ RowPair<X, Tile, SCALARS> pop() {
    wait_for_copies_but<kAhead - 1>();
    const char* const stage = begin_ + oldest_ * kStageBytes;
    RowPair<X, Tile, SCALARS> pair;
#pragma unroll
    for (int vec = 0; vec < Tile::VECTORS; ++vec) {
      pair.first.packed[vec] = load_shared<Tile::N>(reinterpret_cast<const X*>(vector(stage, 2 * vec)));
      pair.second.packed[vec] = load_shared<Tile::N>(reinterpret_cast<const X*>(vector(stage, 2 * vec + 1)));
    }
    const uint4 last = *reinterpret_cast<const uint4*>(last_word(stage));
    pair.row = static_cast<int>(last.x);
    pair.is_there = pair.row >= 0;
    const uint32_t scalars[] = {last.y, last.z};
#pragma unroll
    for (int i = 0; i < SCALARS; ++i) pair.scalar[i] = __uint_as_float(scalars[i]);
    oldest_ = oldest_ == kStages - 1 ? 0 : oldest_ + 1;
    return pair;
  }

 private:
  template <typename Char>
  __device__ static Char* vector(Char* stage, int i) {
    return stage + (i * THREADS + threadIdx.x) * kVectorBytes;
  }
  template <typename Char>
  __device__ static Char* last_word(Char* stage) {
    return stage + 2 * Tile::VECTORS * THREADS * kVectorBytes + threadIdx.x * kLastBytes;
  }

  char* const begin_;
  int next_ = 0, oldest_ = 0;
};

template <typename X, typename Tile, int SCALARS, int THREADS>
using RowQueue = std::conditional_t<Tile::ALIGNED && Tile::N * sizeof(X) >= 4, StagedRows<X, Tile, SCALARS, THREADS>,
                                    HeldRows<X, Tile, SCALARS>>;

// Cosines and sines are computed of a few items together, where tables stay as small as this: between them no thread
// waits for another.
constexpr int kItemsAtOnce = 4, kTableFloats = 1024;

// The blocks of q or of k: as in GradBlocks.
struct GradTiles {
  TilesLaunch tiles;
  SmallDivisor parts;  // items of a token tile
  int apart, blocks, items, share, sums;
  int x_more;   // rows of x from a token to the next, beyond its own heads
  int at_once;  // items whose cosines and sines are computed together
  float* partials;
};

struct RotaryGradLaunch {
  PairShape shape;
  TurnsLaunch turns;
  GradTiles q, k;
  SmallDivisor inner;
  int q_blocks, v_blocks;  // those of v come last
  int table_floats;        // of cosines and sines of as many items
  float reciprocal_cols;
};

// A thread group's rows in the order in which a block has them: of its items, from the last to the first (see
// RowsLaunch::backwards), in each of the item's tiles.
struct ItemRows {
  const GradTiles& own;
  const SmallDivisor& inner;
  const int tokens;
  const PlaceOfRow place;  // in the block's own tile, or in a token's first one
  int item, row, head;
  int left;   // left: tiles of this item that are still to come
  int token;  // `tokens`: there is none

  __device__ ItemRows(const GradTiles& own, const SmallDivisor& inner, int tokens, int own_tile, int group,
                      int first_item)
      : own(own), inner(inner), tokens(tokens), place(own.tiles, own_tile, group), item(first_item) {
    begin_item();
  }

  __device__ bool is_there() const { return token < tokens && head < own.tiles.heads; }
  __device__ int further() const { return token * own.x_more; }

  __device__ void advance() {
    if (left > 0) {
      --left;
      head += own.tiles.tile_heads;
      row += own.tiles.tile_heads * inner.value;
      return;
    }
    item -= own.blocks;
    begin_item();
  }

 private:
  __device__ void begin_item() {
    const int valid = max(item, 0), token_tile = own.parts.quotient(valid);
    const int part = valid - token_tile * own.parts.value;
    token = token_tile * own.tiles.tile_tokens + place.token_of_tile;
    head = place.head + part * own.share * own.tiles.tile_heads;
    row = first_row_of(token, own.tiles.heads, inner) + head * inner.value;
    left = own.share - 1;
    if (item < 0) token = tokens;
  }
};

// rstd, and the mean that LayerNorm subtracts.
template <Kind KIND>
constexpr int kScalars = NormScalars<KIND>::kLayer ? 2 : 1;

// What a row's gradient is made of: x_hat and the cotangent of what was turned.
template <Kind KIND, typename Tile>
struct TurnedBack {
  float x_hat[Tile::VECTORS][Tile::N], d[Tile::VECTORS][Tile::N];
  NormScalars<KIND> s;
  int row;
  bool is_there;

  template <typename X, typename Group>
  __device__ __forceinline__ void take(const RowPair<X, Tile, kScalars<KIND>>& pair, const Group& group) {
    s.rstd = pair.scalar[0];
    if constexpr (NormScalars<KIND>::kLayer) s.mean = pair.scalar[kScalars<KIND> - 1];
    row = pair.row;
    is_there = pair.is_there;
    for_each_vector<Tile>(group, [&](int vec, int col, int remaining) {
      pair.first.get(vec, col, remaining, d[vec]);
      pair.second.get(vec, col, remaining, x_hat[vec]);
      const NormScalars<KIND> own = s.within(remaining);
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) x_hat[vec][i] = own.x_hat(x_hat[vec][i]);
    });
  }

  template <typename X, typename Group>
  __device__ __forceinline__ void finish(const RotaryGradLaunch& launch, const Output& dx, const Group& group,
                                         const float* turns, const FloatWeight<Tile>& factor,
                                         ColumnSums<Tile>& dscale) {
    constexpr int K = NormScalars<KIND>::kSums;
#pragma unroll
    for (int vec = 0; vec < Tile::VECTORS; vec += 2)
      turn_unit(launch.turns, turns, group, group.rank + vec / 2 * Tile::LANES, d[vec], d[vec + 1]);
    Sums<K> sums{};
#pragma unroll
    for (int vec = 0; vec < Tile::VECTORS; ++vec)
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) {
        dscale.value[vec][i] = fmaf(d[vec][i], x_hat[vec][i], dscale.value[vec][i]);
        d[vec][i] *= factor[vec][i];
        sums.value[0] = fmaf(d[vec][i], x_hat[vec][i], sums.value[0]);
        if (K == 2) sums.value[K - 1] += d[vec][i];
      }
    if (!dx.data) return;
#pragma unroll
    for (int k = 0; k < K; ++k) sums.value[k] = group.warp_sum(sums.value[k]);
    const auto to_dx = s.dx(sums, launch.reciprocal_cols);
    X* const out = static_cast<X*>(dx.data) + int64_t{row} * group.end;
    for_each_vector<Tile>(group, [&](int vec, int col, int remaining) {
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) d[vec][i] = to_dx(d[vec][i], x_hat[vec][i]);
      store<Tile::ALIGNED>(out + col, pack<X>(d[vec]), is_there ? remaining : 0);
    });
  }
};

// Blocks of a multiprocessor: a thread with many elements needs more registers.
template <typename Tile>
constexpr int kGradResidency = Tile::VECTORS > 8                                 ? 2
                               : Tile::VECTORS > 2 && Tile::VECTORS* Tile::N > 8 ? 3
                                                                                 : 4;

// How many rows of v a thread group has under way: enough to keep the memory busy.
template <typename Tile>
constexpr int kValueRows = Tile::VECTORS < 8 ? 8 / Tile::VECTORS : 1;

// What a block has, of the queries or of the keys: `index` counts the blocks of the same array, and `column` those that
// have the same tiles of a token. If these stay `apart`, `tile` is which of them it always has.
struct GradShare {
  HeadsGrad of;
  GradTiles own;
  int index, column, tile;
  bool apart;

  // The source of an angle of the items from this one on.
  __device__ AngleSource look_up(const TurnsLaunch& turns, int angles, int from) const {
    return turns.look_up(angles, [&](int i) {
      const int step = i >> own.tiles.token_shift;
      const int later = from - step * own.blocks;
      return later < 0 ? turns.tokens : ((own.parts.quotient(later) - step) << own.tiles.token_shift) + i;
    });
  }
};

__device__ inline GradShare share_of_block(const QkNormRotaryBackward& p, const RotaryGradLaunch& launch) {
  int index = static_cast<int>(blockIdx.x);
  const bool is_q = index < launch.q_blocks;
  if (!is_q) index -= launch.q_blocks;
  const HeadsGrad of = is_q ? p.q : p.k;
  const GradTiles own = is_q ? launch.q : launch.k;
  const bool apart = own.apart > 1 || of.has_scale_per_head;
  const int column = apart ? own.tiles.count.quotient(index) : index;
  return {of, own, index, column, apart ? index - column * own.apart : 0, apart};
}

template <Kind KIND, typename X, typename Tile>
__global__ void __launch_bounds__(kRotaryThreads, kGradResidency<Tile>)
    rotary_grad_kernel(const __grid_constant__ QkNormRotaryBackward p,
                       const __grid_constant__ RotaryGradLaunch launch) {
  using Queue = RowQueue<X, Tile, kScalars<KIND>, kRotaryThreads>;
  if (const int index = static_cast<int>(gridDim.x - 1 - blockIdx.x); index < launch.v_blocks) {
    copy_values<X, Tile, kValueRows<Tile>>(p.v, launch.k.tiles, launch.turns.tokens, launch.shape.cols, index);
    return;
  }
  const GradShare share = share_of_block(p, launch);
  const HeadsGrad& of = share.of;
  const GradTiles& own = share.own;
  const PairGroup<Tile::LANES> group(launch.shape);
  int item = own.items - 1 - share.column;  // negative beyond the first
  const int angles = own.at_once << own.tiles.token_shift;
  AngleSource source = share.look_up(launch.turns, angles, item);

  RowPairArrays<X, kScalars<KIND>> arrays{
      static_cast<const X*>(of.dy.data), static_cast<const X*>(of.x.data), {of.rstd}};
  if constexpr (NormScalars<KIND>::kLayer) arrays.scalar[kScalars<KIND> - 1] = of.mean;
  ItemRows rows(own, launch.inner, launch.turns.tokens, share.tile, group.place, item);
  Queue queue(dynamic_shared());
#pragma unroll
  for (int i = 0; i < Queue::kAhead; ++i, rows.advance())
    queue.push(arrays, group, rows.row, rows.further(), rows.is_there());

  const bool has_scale = of.scale.data && (!share.apart || rows.place.head < own.tiles.heads);
  FloatWeight<Tile> factor(group, has_scale ? from(of.scale, share.apart ? rows.place.head * p.cols : 0) : Input{});
  factor.arrive(p.scale_offset, 1.0f);
  ColumnSums<Tile> dscale;
  float* table = reinterpret_cast<float*>(dynamic_shared() + Queue::kSharedBytes);
  float* other = table + launch.table_floats;
  while (item >= 0) {
    // Nobody reads this table any more: the block has met since.
    launch.turns.fill(table, angles, source);
    source = share.look_up(launch.turns, angles, item - own.at_once * own.blocks);
    __syncthreads();
    for (int i = 0; i < own.at_once && item >= 0; ++i, item -= own.blocks) {
      const float* const turns = launch.turns.of_token(table, (i << own.tiles.token_shift) + rows.place.token_of_tile);
#pragma unroll 1
      for (int tile = 0; tile < own.share; ++tile) {
        TurnedBack<KIND, Tile> row;
        row.take(queue.pop(), group);
        queue.push(arrays, group, rows.row, rows.further(), rows.is_there());
        rows.advance();
        row.template finish<X>(launch, of.dx, group, turns, factor, dscale);
      }
    }
    float* const next = other;
    other = table;
    table = next;
  }
  if (!of.dscale.data) return;
  wait_for_copies();  // of rows that are not there
  __syncthreads();
  dscale.write(group, kRotaryThreads / Tile::LANES, own.sums, 0, reinterpret_cast<float*>(dynamic_shared()),
               own.partials + int64_t{share.index} * own.sums * p.cols);
}

inline PartialSum partial_sum(const HeadsGrad& of, const HeadTiles& tiles, const GradBlocks& blocks, int64_t cols,
                              const float* from) {
  if (!of.has_scale_per_head) return {from, blocks.apart * blocks.blocks, cols, cols, of.dscale};
  return {from, blocks.blocks, of.heads * cols, tiles.count * tiles.heads * cols, of.dscale};
}

template <typename X>
cudaError_t run_qk_norm_rotary_grad(const QkNormRotaryBackward& p, cudaStream_t stream) {
  if (!has_few_rows(p)) return cudaErrorInvalidValue;
  const RotaryTiling tiling = make_rotary_tiling(kDtype<X>, p.cols, p.rotation.dim, p.rotation.interleaved);
  const bool aligned =
      are_aligned_for<X>(tiling, p.q.dy, p.q.x, p.q.dx, p.q.scale, p.k.dy, p.k.x, p.k.dx, p.k.scale, p.v.x, p.v.y);
  const auto heads_of = [](const HeadsGrad& of) { return of.dx || of.dscale ? of.heads : 0; };
  const HeadTiles q = make_head_tiles(heads_of(p.q), p.inner, tiling.groups());
  const HeadTiles k = make_head_tiles(heads_of(p.k), p.inner, tiling.groups());
  GradPartials partials;
  if (const cudaError_t error = make_partials(p, q, k, partials); error != cudaSuccess) return error;
  const TurnsLaunch turns(p.rotation, p.tokens, true);
  const auto tiles_of = [&](const HeadsGrad& of, const HeadTiles& tiles, const GradBlocks& blocks, float* to) {
    const int table = tiles.tokens * turns.floats_of_token();
    return GradTiles{TilesLaunch(tiles, of.heads),
                     SmallDivisor(blocks.parts),
                     static_cast<int>(blocks.apart),
                     static_cast<int>(blocks.blocks),
                     static_cast<int>(blocks.items),
                     static_cast<int>(blocks.share),
                     static_cast<int>(blocks.sums),
                     static_cast<int>(of.x_rows - of.heads),
                     std::clamp(kTableFloats / table, 1, kItemsAtOnce),
                     to};
  };
  const int64_t q_blocks = partials.plan.q.apart * partials.plan.q.blocks;
  const int64_t k_blocks = partials.plan.k.apart * partials.plan.k.blocks;
  if (q_blocks + k_blocks > 0) {
    RotaryGradLaunch launch{make_pair_shape(tiling, p.cols, p.rotation),
                            turns,
                            tiles_of(p.q, q, partials.plan.q, partials.q),
                            tiles_of(p.k, k, partials.plan.k, partials.k),
                            SmallDivisor(p.inner),
                            static_cast<int>(q_blocks),
                            0,
                            0,
                            1.0f / static_cast<float>(p.cols)};
    launch.table_floats = std::max(launch.q.at_once * q.tokens, launch.k.at_once * k.tokens) * turns.floats_of_token();
    const cudaError_t error = with_pair_tiling<X>(tiling, aligned, [&](auto tile) {
      using Tile = decltype(tile);
      const int64_t rows = RowQueue<X, Tile, 1, kRotaryThreads>::kSharedBytes;
      const int64_t shared = std::max(rows + int64_t{8} * launch.table_floats, int64_t{4} * tiling.groups() * p.cols);
      const int64_t of_v = p.v.y ? k.blocks(p.tokens, kValueRows<Tile>) : 0;
      launch.v_blocks = static_cast<int>(of_v);
      const auto kernel =
          p.norm == HeadNorm::rms ? rotary_grad_kernel<Kind::rms, X, Tile> : rotary_grad_kernel<Kind::layer, X, Tile>;
      return launch_rotary(kernel, tiling, q_blocks + k_blocks + of_v, shared, stream, p, launch);
    });
    if (error != cudaSuccess) return error;
  }
  return sum_partials(partial_sum(p.q, q, partials.plan.q, p.cols, partials.q),
                      partial_sum(p.k, k, partials.plan.k, p.cols, partials.k), stream);
}

}  // namespace jaxnorm::cuda
