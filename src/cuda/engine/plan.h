// Which regime a norm runs in: one pure function of row length and dtypes, so that a row's result never depends on the
// number of rows beside it (design law: batch invariance) and so that a captured CUDA graph always holds the same
// kernels. Few rows have kernels of their own, with as many threads and vectors and sums in the same order.
#pragma once

#include <cstdint>

#include "norm.h"

namespace jaxnorm::cuda {

enum class Op : uint8_t { forward, backward };

// Rows are cut into vectors of 16 bytes of x: `vector` elements, the unit in which a thread reads and writes.
constexpr int vector_of(Dtype x) { return 16 / size_of(x); }

constexpr int kWarp = 32;
constexpr int kWholeBlock = 0;        // threads of a thread group: all of the block's, in a cluster of each block's
constexpr int kWholeWarps = -1;       // whole warps, and there may be other thread groups in the block
constexpr int kStreamed = 0;          // vectors a thread: none kept at hand, the row is read again in each pass
constexpr int kMaxThreads = 512;      // threads a block: leaves 128 registers a thread
constexpr int kWideThreads = 640;     // and in the backward of rows that would leave many of those idle: 96
constexpr int kThinThreads = 768;     // or, where each has one vector: 80
constexpr int kMaxCluster = 16;       // blocks a cluster
constexpr int kRowsThreads = 64;      // threads a block where rows share a block of the forward
constexpr int kGatedThreads = 384;    // or a row with a gate that comes last, of a half type, has one for itself
constexpr int kSegmentThreads = 128;  // threads a block where rows are cut into segments
constexpr int kSegment = 4096;        // columns of a segment
constexpr int kColumnThreads = 512;   // threads a block of the kernel that finishes such rows by columns

// Threads of a block of the forward that has a row for itself. A half type takes registers for its unpacked row.
constexpr int max_forward_threads(Dtype x) { return x == Dtype::f32 ? kMaxThreads : kMaxThreads / 2; }

// Elements a thread in the backward, which has a float of scale, dscale and dbias for each.
constexpr int kElements = 16;

// Rows of so many arrays that a thread group of the forward has under way at once: of short rows several, that a thread
// may have four vectors on their way.
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

  int block_threads() const { return threads_per_row * rows_per_block; }

  // Blocks, or clusters, of which each row has a thread group; `at_once`: rows that a thread group has under way.
  int64_t blocks_of(int64_t rows, int at_once) const {
    const int64_t of_block = int64_t{rows_per_block} * at_once;
    return (rows + of_block - 1) / of_block;
  }
  const char* regime() const;
};

// `max_cluster`: the largest cluster the device can launch, 1 where it has none.
Plan make_plan(Op op, Kind kind, Dtype x, int64_t cols, int max_cluster);

// That of the backward with a third array, from the one without: enough is on its way with fewer rows.
Plan beside_extra_operand(Plan plan);

// That of a gated norm, whose rows of up to kGatedCols have one block in the forward and are never cut into segments in
// the backward. `first`: the gate comes before the norm.
Plan make_gated_forward_plan(Dtype x, int64_t cols, bool first);
Plan make_gated_backward_plan(Dtype x, int64_t cols, int max_cluster);

// Whether the forward's clusters draw rows of x that go by vectors, which takes a count in global memory. Layer norm of
// half types has no time for it in its turns.
constexpr bool is_dynamic(Kind kind, Dtype x) { return kind == Kind::rms || x == Dtype::f32; }

// And whether rows of so many columns may need one, on any device.
bool has_tickets(Kind kind, Dtype x, int64_t cols);

}  // namespace jaxnorm::cuda
