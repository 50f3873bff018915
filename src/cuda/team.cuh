// A team is the threads that share one row: 8 or 32 threads of a block, a whole block, or a cluster of blocks.
//
// A reduction has one barrier, whatever the team: each warp reduces its values by shuffles, publishes them to every
// block of the team, and each warp then sums all entries in the same fixed order. Two sets of entries alternate, so
// that a row may publish while slower warps still read the row before.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/plan.h"

namespace jaxnorm::cuda {

constexpr int kWarpSize = 32;

// THREADS: 8, 32 or kWholeBlock. VALUES: how many floats a reduction carries. CLUSTER: the most blocks of a team.
template <int THREADS, int VALUES, int CLUSTER>
class Team {
 public:
  static constexpr bool kSpansWarps = THREADS == kWholeBlock, kSpansBlocks = CLUSTER > 1;
  static_assert(kSpansWarps || !kSpansBlocks);

  int rank, size;                 // this thread's place in the team, and the team's size
  int64_t first_row, row_stride;  // the rows of this team
  int64_t index;                  // the team's place among those of the grid, clusters counted as one

  __device__ Team() {
    if constexpr (kSpansBlocks) {
      const int blocks = Cluster::blocks();
      rank = Cluster::rank() * blockDim.x + threadIdx.x;
      size = blocks * blockDim.x;
      first_row = index = blockIdx.x / blocks;
      row_stride = gridDim.x / blocks;
      if (threadIdx.x < 2) arrivals()[threadIdx.x].init();
      __syncwarp();
      Cluster::arrive();  // publish waits: a block may be sent values only once its barriers stand
    } else if constexpr (kSpansWarps) {
      rank = threadIdx.x;
      size = blockDim.x;
      first_row = index = blockIdx.x;
      row_stride = gridDim.x;
    } else {
      const int teams = blockDim.x / THREADS;
      rank = threadIdx.x % THREADS;
      size = THREADS;
      index = blockIdx.x;
      first_row = index * teams + threadIdx.x / THREADS;
      row_stride = static_cast<int64_t>(gridDim.x) * teams;
    }
  }

  // The sum over the threads of the team that are in this warp, in all of them.
  template <typename T>
  __device__ T warp_sum(T value) const {
    constexpr int width = kSpansWarps ? kWarpSize : THREADS;
    const unsigned mask = width == kWarpSize ? 0xffffffffu : ((1u << width) - 1) << (lane() / width * width);
#pragma unroll
    for (int offset = width / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(mask, value, offset);
    return value;
  }

  // How many of a row's columns, cut into vectors of `vector`, belong to the threads of the team that are in this warp.
  __device__ float warp_cols(int64_t cols, int vector) const {
    if constexpr (!kSpansWarps) {
      return cols;
    } else {
      // Vectors go round the team in turns, all full but the last. A warp's share of the last is cut off at its end.
      const int64_t turn = static_cast<int64_t>(size) * vector, share = kWarpSize * vector;
      const int64_t rest = cols % turn - rank / kWarpSize * share;
      return cols / turn * share + max(static_cast<int64_t>(0), min(share, rest));
    }
  }

  // Makes this warp's values known to the team. The only barrier of a reduction.
  __device__ void publish(const float (&values)[VALUES]) {
    if constexpr (!kSpansWarps) {
#pragma unroll
      for (int v = 0; v < VALUES; ++v) own_[v] = values[v];
    } else {
      Entry* entries = shared_entries() + (turn_ & 1) * kMaxEntries;
      if constexpr (kSpansBlocks) {
        if (turn_ == 0) Cluster::wait();
        Arrival& arrival = arrivals()[turn_ & 1];
        if (threadIdx.x == 0) arrival.expect(size / kWarpSize * sizeof(Entry));
        if (lane() < Cluster::blocks())
#pragma unroll
          for (int v = 0; v < VALUES; ++v) arrival.send(&entries[rank / kWarpSize].values[v], values[v], lane());
        arrival.wait(turn_ >> 1 & 1);
      } else {
        if (lane() == 0)
#pragma unroll
          for (int v = 0; v < VALUES; ++v) entries[rank / kWarpSize].values[v] = values[v];
        __syncthreads();
      }
      ++turn_;
    }
  }

  // The sum of f(entry) over the published entries, one a warp, the same bits in every thread.
  template <typename F>
  __device__ float sum(F f) const {
    if constexpr (!kSpansWarps) {
      return f(own_);
    } else {
      const Entry* entries = shared_entries() + (turn_ & 1 ^ 1) * kMaxEntries;
      float total = 0;
      for (int i = lane(); i < size / kWarpSize; i += kWarpSize) total += f(entries[i].values);
      return warp_sum(total);
    }
  }

  __device__ static int lane() { return threadIdx.x % kWarpSize; }

 private:
  static constexpr int kMaxEntries = kMaxThreads / kWarpSize * CLUSTER;
  struct Entry {
    float values[VALUES];
  };

  __device__ static Entry* shared_entries() {
    __shared__ Entry entries[2 * kMaxEntries];
    return entries;
  }

  __device__ static Arrival* arrivals() {
    __shared__ Arrival arrivals[2];
    return arrivals;
  }

  unsigned turn_ = 0;  // how often this team has published
  float own_[VALUES];
};

}  // namespace jaxnorm::cuda
