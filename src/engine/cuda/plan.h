// The launch plan: a pure function of row length and dtypes, so that a row's result never depends on the number of rows
// beside it (design law: batch invariance) and so that a captured CUDA graph always holds the same kernels. Small
// batches have kernels of their own, with as many threads and vectors and sums in the same order.
#pragma once

#include <cstdint>

#include "operands.h"
#include "ops/norm/call.h"

namespace jaxnorm::cuda {

enum class Way : uint8_t { forward, backward };

// Elements of a vector of 16 bytes of x, the unit in which a thread reads and writes.
constexpr int vector_of(Dtype x) { return 16 / size_of(x); }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int kWarp = 32;
constexpr int kWholeBlock = -2;       // threads of a thread group: all of the block's, in a cluster of each block's
constexpr int kWholeWarps = -1;       // whole warps, and there may be other thread groups in the block
constexpr int kStreamed = 0;          // vectors a thread: none are kept, the row is read again in each pass
constexpr int kMaxThreads = 512;      // threads a block: leaves 128 registers a thread
constexpr int kWideThreads = 640;     // and in the backward of rows that would leave many of those idle: 96
constexpr int kThinThreads = 768;     // or, where each has one vector: 80
constexpr int kMaxCluster = 16;       // blocks a cluster
constexpr int kRowsThreads = 64;      // threads a block where rows share a block of the forward
constexpr int kSegmentThreads = 128;  // threads a block where rows are cut into segments
constexpr int kSegment = 4096;        // columns of a segment
constexpr int kColumnThreads = 512;   // threads a block of the kernel that finishes such rows by columns

// Elements a thread in the backward, which has a float of scale, dscale and dbias for each.
constexpr int kElements = 16;

// How many rows of so many arrays a thread group of the forward has under way at once. Of short rows it has several, so
// that a thread has four vectors on their way.
constexpr int rows_at_once(int threads_per_row, int vectors, int arrays = 1) {
  return threads_per_row > 0 && threads_per_row <= kWarp && vectors * arrays < 4 ? 4 / (vectors * arrays) : 1;
}

struct Plan {
  int threads_per_row;  // of one block: 8, 16 or 32 of a warp, or whole warps
  int vectors;          // per thread; kStreamed for a looped row
  int rows_per_block;   // and thread groups, where a thread group has one row
  int blocks_per_row;   // more than 1: a cluster
  // Of a row that two kernels work on: one sums up each segment, one finishes column by column. So do rows that a
  // cluster might have for itself, where dy is of another type or there is no room.
  int segments = 0;
  int entry = -1;  // of the forward: its regime's entry in the table that the plan was made from (regimes.h)

  int block_threads() const { return threads_per_row * rows_per_block; }

  // Blocks, or clusters, with a thread group for every `at_once` rows.
  int64_t blocks_of(int64_t rows, int at_once) const {
    const int64_t of_block = int64_t{rows_per_block} * at_once;
    return (rows + of_block - 1) / of_block;
  }
  const char* regime() const;
};

// `max_cluster`: the largest cluster the device can launch, 1 where it has none.
Plan make_plan(Way way, Kind kind, Dtype x, int64_t cols, int max_cluster);

// That of the backward with a third array, from the one without: enough is on its way with fewer rows.
Plan beside_extra_operand(Plan plan);

// That of a gated norm, whose rows of up to kGatedCols have one block in the forward and are never cut into segments in
// the backward. `first`: as in Gate.
Plan make_gated_forward_plan(Dtype x, int64_t cols, bool first);
Plan make_gated_backward_plan(Dtype x, int64_t cols, int max_cluster);

// That of rows that are read once and have one block, however long they are.
Plan make_one_block_plan(Dtype x, int64_t cols);

// That of an op that has a row of two arrays at hand, and one sum a row: in PairRegimes.
Plan make_pair_plan(Dtype x, int64_t cols, int max_cluster);

// That of rows of which only a window is read: in WindowRegimes.
Plan make_window_plan(Dtype x, int64_t cols);

// Whether clusters of the forward have a dynamic schedule for rows of x that vectors divide, which takes a count in
// global memory. LayerNorm of half types has no time for it.
constexpr bool is_dynamic(Kind kind, Dtype x) { return kind == Kind::rms || x == Dtype::f32; }

// Whether rows of so many columns want that count, on any device.
bool has_tickets(Kind kind, Dtype x, int64_t cols);

}  // namespace jaxnorm::cuda
