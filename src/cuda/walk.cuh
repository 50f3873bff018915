// A row as a team sees it: cut into vectors of N elements. Each warp of the team owns neighbouring vectors, and of
// these lane i owns vectors i, i + 32, ... A row that is streamed is dealt out to all threads of the team in turns.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/team.cuh"

namespace jaxnorm::cuda {

// How a kernel walks rows of X in regime R. As the compiler knows ACCESS, the checks are gone where every vector is
// whole.
template <typename X, typename R, Access ACCESS>
struct Walk {
  static constexpr int N = ACCESS >= Access::ring_elements ? 1 : kVector<X>;
  static constexpr int VECTORS = R::kVectors * kVector<X> / N;
  static constexpr int LANES = R::kThreads > 0 ? R::kThreads : kWarp;  // of a warp that share a row
  static constexpr int STRIDE = N * LANES;                             // columns from a thread's vector to its next
  static constexpr bool SHIFTED = ACCESS == Access::shifted;
  static constexpr bool ALIGNED = ACCESS != Access::unaligned && !SHIFTED, STREAMED = VECTORS == kStreamed;
  static constexpr bool RING = ACCESS == Access::ring || ACCESS == Access::ring_elements;
  static constexpr bool KEPT = !STREAMED;  // whether a row is read once and is at hand then
};

// The same vectors in the same order, so that sums have the same bits, but read again in each pass: in little code.
template <typename X, typename R, Access ACCESS>
struct WalkAgain : Walk<X, R, ACCESS> {
  static constexpr bool RING = false, KEPT = false;
};

// The columns of its block's share before a thread's first.
template <typename W, typename Team>
__device__ int first_of_thread(const Team& team) {
  return team.rank / W::LANES * W::VECTORS * W::STRIDE + team.rank % W::LANES * W::N;
}

// Calls f(slot, first, left) for each vector of this thread: `slot` counts them (a constant once unrolled, so that it
// may index registers), `first` is the vector's first column, `left` how many columns the row has from there on: none
// is left (zero or less) where a team has more vectors than the row. All threads of a team call f equally often.
template <typename W, typename Team, typename F>
__device__ void for_each_vector(const Team& team, F f) {
  constexpr int N = W::N;
  if constexpr (W::STREAMED) {
    const int64_t step = static_cast<int64_t>(team.threads) * N;
    for (int64_t turn = team.begin; turn < team.end; turn += step) {
      const int64_t first = turn + static_cast<int64_t>(team.rank) * N;
      f(0, first, static_cast<int>(min(static_cast<int64_t>(N), team.end - first)));
    }
  } else {
    const int first = static_cast<int>(team.begin) + first_of_thread<W>(team), end = static_cast<int>(team.end);
    const auto visit = [&](int slot) {
      const int at = first + slot * W::STRIDE;
      f(slot, at, end - at);
    };
    if constexpr (W::KEPT) {
#pragma unroll
      for (int slot = 0; slot < W::VECTORS; ++slot) visit(slot);
    } else {
#pragma unroll 1
      for (int slot = 0; slot < W::VECTORS; ++slot) visit(slot);
    }
  }
}

// How many columns of its block's share the team's threads in this warp have.
template <typename W, typename Team>
__device__ float warp_cols(const Team& team) {
  const int64_t cols = team.end - team.begin;
  if constexpr (!Team::kSpansWarps) {
    return cols;
  } else if constexpr (W::STREAMED) {
    // Turns are all whole but the last. A warp's share of the last is cut off at its end.
    constexpr int64_t share = kWarp * W::N;
    const int64_t turn = int64_t{team.threads} * W::N, turns = cols / turn;
    const int64_t rest = cols - turns * turn - team.rank / kWarp * share;
    return turns * share + max(int64_t{0}, min(share, rest));
  } else {
    constexpr int share = kWarp * W::N * W::VECTORS;
    return max(0, min(share, static_cast<int>(cols) - team.rank / kWarp * share));
  }
}

}  // namespace jaxnorm::cuda
