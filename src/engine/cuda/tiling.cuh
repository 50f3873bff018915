// How a thread group divides a row: into vectors of N elements. Each warp has neighbouring vectors, and lane i of the
// warp has vectors i, i + 32, ... of them. The vectors of a streamed row go round all threads of the thread group.
#pragma once

#include "engine/cuda/launch.cuh"
#include "engine/cuda/thread_group.cuh"

namespace jaxnorm::cuda {

// The tiling of rows of X in regime R. As the compiler knows ACCESS, the checks are gone where every vector is whole.
template <typename X, typename R, Access ACCESS>
struct Tiling {
  static constexpr int N = ACCESS >= Access::pipelined_scalar ? 1 : kVector<X>;
  static constexpr int VECTORS = R::kVectors * kVector<X> / N;
  static constexpr int LANES = R::kThreads > 0 ? R::kThreads : kWarp;  // lanes of a warp that share a row
  static constexpr int STRIDE = N * LANES;                             // columns from a thread's vector to its next
  static constexpr bool UNALIGNED = ACCESS == Access::unaligned;
  static constexpr bool ALIGNED = ACCESS != Access::elementwise && !UNALIGNED, STREAMED = VECTORS == kStreamed;
  static constexpr bool PIPELINED = ACCESS == Access::pipelined || ACCESS == Access::pipelined_scalar;
  static constexpr bool KEPT = !STREAMED;  // whether a row is read once and then at hand
};

// The same vectors in the same order, so that sums have the same bits, but read again in each pass. It takes little
// code.
template <typename X, typename R, Access ACCESS>
struct RereadTiling : Tiling<X, R, ACCESS> {
  static constexpr bool PIPELINED = false, KEPT = false;
};

// Columns of a row through which a thread group goes in rounds, so that each thread has a share of few columns too.
struct Rounds {
  int threads, rank;
  int64_t begin, end;
};

// How many columns of its block's share come before a thread's first.
template <typename Tile, typename ThreadGroup>
__device__ int first_of_thread(const ThreadGroup& group) {
  return group.rank / Tile::LANES * Tile::VECTORS * Tile::STRIDE + group.rank % Tile::LANES * Tile::N;
}

// Calls f(vec, col, remaining) for each vector of this thread. `vec` counts them; once unrolled it is a constant, so
// that it may index registers. `col` is the vector's first column, and `remaining` how many columns the row has from
// there on: zero or less where a thread group has more vectors than the row. All threads of a thread group call f
// equally often.
template <typename Tile, typename ThreadGroup, typename F>
__device__ void for_each_vector(const ThreadGroup& group, F f) {
  constexpr int N = Tile::N;
  if constexpr (Tile::STREAMED) {
    const int64_t step = static_cast<int64_t>(group.threads) * N;
    for (int64_t begin = group.begin; begin < group.end; begin += step) {
      const int64_t col = begin + static_cast<int64_t>(group.rank) * N;
      f(0, col, static_cast<int>(min(static_cast<int64_t>(N), group.end - col)));
    }
  } else if constexpr (std::is_same_v<ThreadGroup, Rounds>) {
    const int begin = static_cast<int>(group.begin), end = static_cast<int>(group.end);
#pragma unroll
    for (int vec = 0; vec < Tile::VECTORS; ++vec) {
      const int col = begin + vec * group.threads * N;
      if (col < end) f(vec, col + group.rank * N, end - col - group.rank * N);
    }
  } else {
    const int first = static_cast<int>(group.begin) + first_of_thread<Tile>(group), end = static_cast<int>(group.end);
    const auto visit = [&](int vec) {
      const int col = first + vec * Tile::STRIDE;
      f(vec, col, end - col);
    };
    if constexpr (Tile::KEPT) {
#pragma unroll
      for (int vec = 0; vec < Tile::VECTORS; ++vec) visit(vec);
    } else {
#pragma unroll 1
      for (int vec = 0; vec < Tile::VECTORS; ++vec) visit(vec);
    }
  }
}

// The vectors of a streamed row in batches, of which all are under way at once: calls f(visit) for each, and visit(g)
// calls g(i, col, remaining) for its vectors, the i-th of the batch. They come in the order of for_each_vector, and all
// batches but the last have whole vectors.
template <typename Tile, int BATCH, typename ThreadGroup, typename F>
__device__ void for_each_streamed_batch(const ThreadGroup& group, F f) {
  constexpr int N = Tile::N;
  const int64_t step = static_cast<int64_t>(group.threads) * N;
  int64_t col = group.begin + static_cast<int64_t>(group.rank) * N;
  const auto visit = [&](auto remaining, auto g) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) g(i, col + i * step, remaining(col + i * step));
  };
  for (int64_t rest = group.end - group.begin; rest > 0; rest -= BATCH * step, col += BATCH * step)
    if (rest >= BATCH * step) {
      f([&](auto g) { visit([](int64_t) { return N; }, g); });
    } else {
      f([&](auto g) {
        visit([&](int64_t at) { return static_cast<int>(max(min(int64_t{N}, group.end - at), int64_t{0})); }, g);
      });
    }
}

// How many columns of its block's share the thread group's threads in this warp have.
template <typename Tile, typename ThreadGroup>
__device__ float warp_cols(const ThreadGroup& group) {
  const int64_t cols = group.end - group.begin;
  if constexpr (!ThreadGroup::kSpansWarps) {
    return cols;
  } else if constexpr (Tile::STREAMED) {
    // All rounds of the vectors are whole but the last, in which a warp's share is cut off at the row's end.
    constexpr int64_t share = kWarp * Tile::N;
    const int64_t round = int64_t{group.threads} * Tile::N, rounds = cols / round;
    const int64_t rest = cols - rounds * round - group.rank / kWarp * share;
    return rounds * share + max(int64_t{0}, min(share, rest));
  } else {
    constexpr int share = kWarp * Tile::N * Tile::VECTORS;
    return max(0, min(share, static_cast<int>(cols) - group.rank / kWarp * share));
  }
}

}  // namespace jaxnorm::cuda
