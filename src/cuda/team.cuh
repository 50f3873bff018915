// A team is the threads that share one row: 8 or 32 threads of a block, a whole block, or a cluster of blocks.
//
// A reduction has one barrier, whatever the team: each warp reduces its values by shuffles, publishes them to every block
// of the team, and each warp then sums all entries in the same fixed order. Two sets of entries alternate, so that a row
// may publish while slower warps still read the row before.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/plan.h"

namespace jaxnorm::cuda {

constexpr int kWarpSize = 32;

// THREADS: 8, 32 or kWholeBlock. VALUES: how many floats a reduction carries.
template <int THREADS, int VALUES, bool CLUSTER>
class Team {
 public:
  static constexpr bool kSpansWarps = THREADS == kWholeBlock;
  static_assert(kSpansWarps || !CLUSTER);

  int rank, size;                  // this thread's place in the team, and the team's size
  int64_t first_row, row_stride;   // the rows of this team
  int64_t index;                   // the team's place among those of the grid, clusters counted as one

  __device__ Team() {
    if constexpr (CLUSTER) {
      const int blocks = Cluster::blocks();
      rank = Cluster::rank() * blockDim.x + threadIdx.x;
      size = blocks * blockDim.x;
      first_row = index = blockIdx.x / blocks;
      row_stride = gridDim.x / blocks;
      Cluster::sync();  // a block's shared memory may be written only once it runs
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

  // Makes this warp's values known to the team. The only barrier of a reduction.
  __device__ void publish(const float (&values)[VALUES]) {
    if constexpr (!kSpansWarps) {
#pragma unroll
      for (int v = 0; v < VALUES; ++v) own_[v] = values[v];
    } else {
      current_ ^= 1;
      const int warps = blockDim.x / kWarpSize, warp = threadIdx.x / kWarpSize;
      if constexpr (CLUSTER) {
        if (lane() < Cluster::blocks()) {
          Entry* entries = Cluster::shared_of(shared_entries(), lane()) + current_ * kMaxEntries;
          write(entries[Cluster::rank() * warps + warp], values);
        }
        Cluster::sync();
      } else {
        if (lane() == 0) write(shared_entries()[current_ * kMaxEntries + warp], values);
        __syncthreads();
      }
    }
  }

  // The sum of f(entry) over the published entries, one a warp, the same bits in every thread.
  template <typename F>
  __device__ float sum(F f) const {
    if constexpr (!kSpansWarps) {
      return f(own_);
    } else {
      const Entry* entries = shared_entries() + current_ * kMaxEntries;
      float total = 0;
      for (int i = lane(); i < size / kWarpSize; i += kWarpSize) total += f(entries[i].values);
      return warp_sum(total);
    }
  }

  __device__ static int lane() { return threadIdx.x % kWarpSize; }

 private:
  static constexpr int kMaxEntries = kMaxThreads / kWarpSize * (CLUSTER ? kMaxCluster : 1);
  struct Entry {
    float values[VALUES];
  };

  __device__ static Entry* shared_entries() {
    __shared__ Entry entries[2 * kMaxEntries];
    return entries;
  }

  __device__ static void write(Entry& to, const float (&values)[VALUES]) {
#pragma unroll
    for (int v = 0; v < VALUES; ++v) to.values[v] = values[v];
  }

  int current_ = 0;
  float own_[VALUES];
};

}  // namespace jaxnorm::cuda
