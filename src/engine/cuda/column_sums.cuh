// Sums over the rows of a thread group, one float for each element that a thread owns.
#pragma once

#include "engine/cuda/tiling.cuh"

namespace jaxnorm::cuda {

// Where there are no such sums.
struct NoColumnSums {};

// Adds up what the thread groups of a block have left in `space`, `cols` floats each, in `sums` sums: the i-th of every
// thread group whose place is i modulo `sums`. Sum 0 becomes row `first` of `to`, the others follow, all the way round.
__device__ __forceinline__ void add_up(float* space, int cols, int thread_groups, int sums, int first, float* to) {
  const int all = sums * cols;
  int count = thread_groups * cols;
  const int threads = static_cast<int>(blockDim.x), begun = threads / all * all;
  // Of fewer sums than threads several threads begin with each.
  if (begun > all && begun < count) {
    if (threadIdx.x < begun) {
      float sum = space[threadIdx.x];
#pragma unroll 4
      for (int i = threadIdx.x + begun; i < count; i += begun) sum += space[i];
      space[threadIdx.x] = sum;
    }
    count = begun;
    __syncthreads();
  }
  // Of more sums a thread has a few under way at once.
  constexpr int kAtOnce = 4;
  for (int begin = threadIdx.x; begin < all; begin += kAtOnce * threads) {
    float sum[kAtOnce] = {};
    for (int from = begin; from < count; from += all)
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (begin + i * threads < all && from + i * threads < count) sum[i] += space[from + i * threads];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = begin + i * threads + first * cols;
      if (begin + i * threads < all) to[at < all ? at : at - all] = sum[i];
    }
  }
}

template <typename Tile>
struct ColumnSums {
  float value[Tile::VECTORS][Tile::N] = {};

  // Writes those of a block or a cluster. Thread groups that share a block add up theirs in `space`, which has a float
  // for each element that the block's threads own; `sums` and `first` as in add_up.
  template <typename Group>
  __device__ void write(const Group& group, int thread_groups, int sums, int first, float* space, float* to) const {
    if (Group::kSpansBlocks || thread_groups == 1) {
      for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
        store<Tile::ALIGNED>(to + col, pack<float>(value[vec]), remaining);
      });
      return;
    }
    float* const own = space + group.place * static_cast<int>(group.end);
    for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
      if constexpr (Tile::ALIGNED) {
        if (remaining > 0) store_shared(own + col, value[vec]);
      } else {
#pragma unroll
        for (int i = 0; i < Tile::N; ++i)
          if (i < remaining) own[col + i] = value[vec][i];
      }
    });
    __syncthreads();
    add_up(space, static_cast<int>(group.end), thread_groups, sums, first, to);
    __syncthreads();  // `space` may be used again
  }
};

}  // namespace jaxnorm::cuda
