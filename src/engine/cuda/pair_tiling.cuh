// How a thread group divides a row whose columns go by pairs: in units of two vectors, so that the thread that has a
// column has the other one of its pair as well. The engine's tiling would have that of some rows only, those of which
// the pairs lie half a row apart and fill every thread.
#pragma once

#include "engine/cuda/tiling.cuh"

namespace jaxnorm::cuda {

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

}  // namespace jaxnorm::cuda
