// A thread group is the threads that share one row: 8, 16 or 32 threads of a warp, whole warps of a block, or all
// blocks of a cluster. It reduces in a fixed order: each warp by shuffles, then the warps of a block, then the blocks
// of a cluster.
#pragma once

#include <type_traits>

#include "engine/cuda/plan.h"
#include "engine/cuda/ptx.cuh"
#include "engine/cuda/vector.cuh"

namespace jaxnorm::cuda {

__device__ inline int lane() { return threadIdx.x % kWarp; }

// The sum over groups of WIDTH neighbouring threads, in all of them.
template <int WIDTH, typename T>
__device__ T group_sum(T value) {
#pragma unroll
  for (int offset = WIDTH / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(lanes_mask<WIDTH>(), value, offset);
  return value;
}

// The largest of their values that are numbers.
template <int WIDTH>
__device__ float group_max(float value) {
#pragma unroll
  for (int offset = WIDTH / 2; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(lanes_mask<WIDTH>(), value, offset));
  return value;
}

// The largest of their magnitudes.
template <int WIDTH>
__device__ float group_largest(float magnitude) {
  if constexpr (WIDTH == kWarp) {
    return warp_largest(magnitude);
  } else {
#pragma unroll
    for (int offset = WIDTH / 2; offset > 0; offset /= 2)
      magnitude = larger_magnitude(magnitude, __shfl_xor_sync(lanes_mask<WIDTH>(), magnitude, offset));
    return magnitude;
  }
}

constexpr int kMaxParts = 16;  // parts that a reduction merges: of the warps of a thread group, or of the blocks of a
                               // cluster

// Combines `count` parts by add(a, b), in all lanes of a warp. Every 4 lanes have the parts, or every 16 if there are
// more than 4; lanes beyond `count` have zeros.
template <typename F>
__device__ float over_parts(float value, int count, F add) {
  const auto add_over = [&](int distance) { value = add(value, __shfl_xor_sync(0xffffffffu, value, distance)); };
  static_assert(kMaxParts == 16);
  if (count > 4) {
    add_over(8);
    add_over(4);
  }
  add_over(2);
  add_over(1);
  return value;
}

__device__ inline float sum_of_parts(float value, int count) {
  return over_parts(value, count, [](float a, float b) { return a + b; });
}

// Of how many of the parts it holds.
__device__ inline int count_of_parts(bool holds, int count) {
  return __popc(__ballot_sync(0xffffffffu, holds) & (count > 4 ? (1u << kMaxParts) - 1 : 0xfu));
}

// K sums over a part of a row.
template <int K>
struct Sums {
  float value[K];
  static constexpr int kTicket = -1;  // where ThreadGroup::publish puts a ticket; here is no room for one

  __device__ void add(const Sums& more) {
#pragma unroll
    for (int k = 0; k < K; ++k) value[k] += more.value[k];
  }

  // Merges `count` parts, one a lane as for `sum_of_parts`.
  __device__ static Sums merge(const Sums& part, const Sums&, int count, float) {
    Sums total;
#pragma unroll
    for (int k = 0; k < K; ++k) total.value[k] = sum_of_parts(part.value[k], count);
    return total;
  }
};

// A sum with room for a ticket.
struct TicketSum {
  float value[2];
  static constexpr int kTicket = 1;

  TicketSum() = default;
  __device__ TicketSum(const Sums<1>& sum) : value{sum.value[0], 0} {}

  __device__ static TicketSum merge(const TicketSum& part, const TicketSum&, int count, float) {
    return Sums<1>{{sum_of_parts(part.value[0], count)}};
  }
};

// The count, mean and sum of squared deviations of a part of a row.
struct Moments {
  float value[4];
  static constexpr int kTicket = 3;

  __device__ void set_cols(int64_t cols) { value[0] = cols; }

  // Chan, Golub and LeVeque 1983, with means relative to that of the first part. `reciprocal`: of the sum of all
  // counts. A lane without a part has a count of 0.
  __device__ static Moments merge(const Moments& part, const Moments& first, int parts, float reciprocal) {
    const float count = part.value[0], origin = first.value[1], distance = part.value[1] - origin;
    const float mean = sum_of_parts(count > 0 ? count * distance : 0.0f, parts) * reciprocal, off = distance - mean;
    return {{0, origin + mean, sum_of_parts(count > 0 ? fmaf(count * off, off, part.value[2]) : 0.0f, parts), 0}};
  }
};

// Merges parts that carry a magnitude, in their first value: the largest.
struct Largest {
  template <typename Part>
  __device__ static Part merge(const Part& part, const Part&, int count, float) {
    return {{over_parts(part.value[0], count, larger_magnitude)}};
  }
};

// THREADS: 8, 16, 32, kWholeWarps or kWholeBlock. Part: what a reduction carries of a share of a row. CLUSTER: the most
// blocks of a thread group. MOST: the most threads of a block. MANY: whether a thread group may have more warps than
// kMaxParts.
//
// A reduction is published and collected. In a cluster the next one may be published before the last one is collected,
// so that the blocks exchange their parts meanwhile. By: what merges the parts, if it is not Part itself.
template <int THREADS, typename Part, int CLUSTER, int MOST = kMaxThreads, bool MANY = false>
class ThreadGroup {
 public:
  static constexpr int kThreads = THREADS;
  static constexpr bool kSpansWarps = THREADS <= 0, kSpansBlocks = CLUSTER > 1;
  static_assert(THREADS == kWholeBlock || !kSpansBlocks);
  static constexpr int kGroupsOfWarp = kSpansWarps ? 1 : kWarp / THREADS;

  const int threads, rank;  // the thread group's threads in this block, and this one's place among them
  const int place;          // the thread group's place in the block
  int64_t begin, end;       // the columns that are this block's
  // Which block or cluster of the grid this is, and of how many. The one that starts first has the last rows: see
  // RowsLaunch::backwards.
  int64_t index, count;

  // `span`: how many columns each block of a cluster has. `reciprocal`: of the number of all columns.
  __device__ ThreadGroup(int threads_per_row, int64_t cols, int64_t span, float reciprocal)
      : threads(THREADS > 0              ? THREADS
                : THREADS == kWholeBlock ? static_cast<int>(blockDim.x)
                                         : threads_per_row),
        rank(THREADS == kWholeBlock ? threadIdx.x : threadIdx.x % threads),
        place(THREADS == kWholeBlock ? 0 : threadIdx.x / threads),
        begin(0),
        end(cols),
        index(gridDim.x - 1 - blockIdx.x),
        count(gridDim.x),
        reciprocal_(reciprocal) {
    if constexpr (kSpansBlocks) {
      begin = min(cols, Cluster::rank() * span);
      end = min(cols, begin + span);
      index /= Cluster::blocks();
      count /= Cluster::blocks();
      block_reciprocal_ = cuda::reciprocal(static_cast<float>(end - begin));
      if (threadIdx.x < kSets) arrivals()[threadIdx.x].init();
      __syncwarp();
      Cluster::arrive();  // publish waits: a block may be sent values only once its barriers stand
    }
  }

  // The sum over the threads of the thread group that are in this warp, in all of them.
  template <typename T>
  __device__ T warp_sum(T value) const {
    return group_sum<kSpansWarps ? kWarp : THREADS>(value);
  }

  // The largest value of the same threads, of those that are numbers.
  __device__ float warp_max(float value) const { return group_max<kSpansWarps ? kWarp : THREADS>(value); }

  // The thread group's threads in this block, which are of several warps, wait for each other.
  __device__ void meet() const {
    if constexpr (THREADS == kWholeBlock) {
      __syncthreads();
    } else {
      barrier(1 + place, threads);
    }
  }

  // The largest of the magnitudes of the same threads.
  __device__ float warp_largest(float magnitude) const {
    return group_largest<kSpansWarps ? kWarp : THREADS>(magnitude);
  }

  // Adds this warp's part of a row to the next reduction. On return the thread group's threads in this block have met,
  // if they are of several warps. The blocks of a cluster get the ticket of the first one's first thread with it.
  template <typename By = Part>
  __device__ void publish(const Part& part, [[maybe_unused]] float ticket = 0) {
    if constexpr (!kSpansWarps) {
      own_ = part;
      return;
    }
    Part* parts = warp_parts(published_);
    if (lane() == 0) parts[rank / kWarp] = part;
    meet();
    if constexpr (kSpansBlocks) {
      if (published_ == 0) Cluster::wait();
      if (rank < kWarp) {
        Part block = merge<By>(parts, threads / kWarp, block_reciprocal_);
        if constexpr (std::is_same_v<By, Moments>) block.set_cols(end - begin);
        if constexpr (Part::kTicket >= 0 && std::is_same_v<By, Part>)
          block.value[Part::kTicket] = __shfl_sync(0xffffffffu, ticket, 0);
        TransactionBarrier& arrival = arrivals()[published_ % kSets];
        if (rank == 0) arrival.expect(Cluster::blocks() * sizeof(Part));
        if (lane() < Cluster::blocks())
          arrival.send(block_parts(published_)[Cluster::rank()].value, block.value, lane());
      }
    }
    ++published_;
  }

  // The merged parts of the whole thread group, with the same bits in every thread. Reductions are collected in the
  // order in which they were published.
  template <typename By = Part>
  __device__ Part collect() {
    if constexpr (!kSpansWarps) {
      return own_;
    } else if constexpr (!kSpansBlocks) {
      return merge<By>(warp_parts(collected_++), threads / kWarp, reciprocal_);
    } else {
      arrivals()[collected_ % kSets].wait(collected_ / kSets % 2);
      return merge<By>(block_parts(collected_++), Cluster::blocks(), reciprocal_);
    }
  }

  // The ticket that came with the reduction collected last. To be asked before the next is published.
  __device__ float ticket() const { return block_parts(collected_ - 1)[0].value[Part::kTicket]; }

  __device__ float reciprocal() const { return reciprocal_; }

 private:
  // How many reductions have room for their parts. A block that publishes one more has collected all but the last, to
  // which every block has published; so every block has collected all but the last two before that, and one more is
  // free.
  static constexpr unsigned kSets = 4;

 public:
  // What it takes of shared memory.
  static constexpr int kSharedBytes =
      kSets * static_cast<int>(sizeof(Part) * (MOST / kWarp + CLUSTER) + sizeof(TransactionBarrier));

 private:
  template <typename By>
  __device__ static Part merge(const Part* parts, int count, float reciprocal) {
    const int i = lane() % (count > 4 ? kMaxParts : 4);
    Part part = i < count ? parts[i] : Part{};
    if constexpr (MANY)
      if (i + kMaxParts < count) part.add(parts[i + kMaxParts]);
    return By::merge(part, parts[0], count, reciprocal);
  }

  __device__ Part* warp_parts(unsigned reduction) const {
    constexpr int warps = MOST / kWarp;
    static_assert(warps <= 2 * kMaxParts && CLUSTER <= kMaxParts);
    __shared__ __align__(16) Part parts[kSets * warps];
    return parts + reduction % kSets * warps + place * (threads / kWarp);
  }

  __device__ static Part* block_parts(unsigned reduction) {
    __shared__ __align__(16) Part parts[kSets * CLUSTER];
    return parts + reduction % kSets * CLUSTER;
  }

  __device__ static TransactionBarrier* arrivals() {
    __shared__ TransactionBarrier arrivals[kSets];
    return arrivals;
  }

  const float reciprocal_;      // of the number of columns
  float block_reciprocal_ = 0;  // and of this block's
  unsigned published_ = 0, collected_ = 0;
  Part own_;
};

}  // namespace jaxnorm::cuda
