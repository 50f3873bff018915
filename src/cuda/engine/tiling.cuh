// A row as a thread group sees it: cut into vectors of N elements. Each warp of the thread group owns neighbouring
// vectors, and of these lane i owns vectors i, i + 32, ... A row that is streamed is dealt out to all threads of the
// thread group in turns.
#pragma once

#include "cuda/engine/launch.cuh"
#include "cuda/engine/thread_group.cuh"

namespace jaxnorm::cuda {

// How a kernel walks rows of X in regime R. As the compiler knows ACCESS, the checks are gone where every vector is
// whole.
template <typename X, typename R, Access ACCESS>
struct Tiling {
  static constexpr int N = ACCESS >= Access::pipelined_scalar ? 1 : kVector<X>;
  static constexpr int VECTORS = R::kVectors * kVector<X> / N;
  static constexpr int LANES = R::kThreads > 0 ? R::kThreads : kWarp;  // of a warp that share a row
  static constexpr int STRIDE = N * LANES;                             // columns from a thread's vector to its next
  static constexpr bool UNALIGNED = ACCESS == Access::unaligned;
  static constexpr bool ALIGNED = ACCESS != Access::elementwise && !UNALIGNED, STREAMED = VECTORS == kStreamed;
  static constexpr bool PIPELINED = ACCESS == Access::pipelined || ACCESS == Access::pipelined_scalar;
  static constexpr bool KEPT = !STREAMED;  // whether a row is read once and is at hand then
};

// The same vectors in the same order, so that sums have the same bits, but read again in each pass: in little code.
template <typename X, typename R, Access ACCESS>
struct RereadTiling : Tiling<X, R, ACCESS> {
  static constexpr bool PIPELINED = false, KEPT = false;
};

// The columns of its block's share before a thread's first.
template <typename Tile, typename ThreadGroup>
__device__ int first_of_thread(const ThreadGroup& group) {
  return group.rank / Tile::LANES * Tile::VECTORS * Tile::STRIDE + group.rank % Tile::LANES * Tile::N;
}

// Calls f(slot, first, left) for each vector of this thread: `slot` counts them (a constant once unrolled, so that it
// may index registers), `first` is the vector's first column, `left` how many columns the row has from there on: none
// is left (zero or less) where a thread group has more vectors than the row. All threads of a thread group call f
// equally often.
template <typename Tile, typename ThreadGroup, typename F>
__device__ void for_each_vector(const ThreadGroup& group, F f) {
  constexpr int N = Tile::N;
  if constexpr (Tile::STREAMED) {
    const int64_t step = static_cast<int64_t>(group.threads) * N;
    for (int64_t turn = group.begin; turn < group.end; turn += step) {
      const int64_t first = turn + static_cast<int64_t>(group.rank) * N;
      f(0, first, static_cast<int>(min(static_cast<int64_t>(N), group.end - first)));
    }
  } else {
    const int first = static_cast<int>(group.begin) + first_of_thread<Tile>(group), end = static_cast<int>(group.end);
    const auto visit = [&](int slot) {
      const int at = first + slot * Tile::STRIDE;
      f(slot, at, end - at);
    };
    if constexpr (Tile::KEPT) {
#pragma unroll
      for (int slot = 0; slot < Tile::VECTORS; ++slot) visit(slot);
    } else {
#pragma unroll 1
      for (int slot = 0; slot < Tile::VECTORS; ++slot) visit(slot);
    }
  }
}

// How many columns of its block's share the thread group's threads in this warp have.
template <typename Tile, typename ThreadGroup>
__device__ float warp_cols(const ThreadGroup& group) {
  const int64_t cols = group.end - group.begin;
  if constexpr (!ThreadGroup::kSpansWarps) {
    return cols;
  } else if constexpr (Tile::STREAMED) {
    // Turns are all whole but the last. A warp's share of the last is cut off at its end.
    constexpr int64_t share = kWarp * Tile::N;
    const int64_t turn = int64_t{group.threads} * Tile::N, turns = cols / turn;
    const int64_t rest = cols - turns * turn - group.rank / kWarp * share;
    return turns * share + max(int64_t{0}, min(share, rest));
  } else {
    constexpr int share = kWarp * Tile::N * Tile::VECTORS;
    return max(0, min(share, static_cast<int>(cols) - group.rank / kWarp * share));
  }
}

}  // namespace jaxnorm::cuda
