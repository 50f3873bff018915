// Which regime a norm runs in: one pure function of row length and dtypes, so that a row's result never depends on the
// number of rows beside it (design law: batch invariance) and so that a captured CUDA graph always holds the same
// kernels.
#pragma once

#include <cstdint>

#include "norm.h"

namespace jaxnorm::cuda {

enum class Op : uint8_t { forward, backward };

// Rows are cut into vectors of 16 bytes of x: `vector` elements, the unit in which a thread reads and writes.
constexpr int vector_of(Dtype x) { return 16 / size_of(x); }

constexpr int kWholeBlock = 0;          // threads of a team: all of the block's (and, in a cluster, of its blocks)
constexpr int kStreamed = 0;            // vectors a thread: none kept in registers, the row is read again in each pass
constexpr int kMaxThreads = 512;        // threads a block: leaves 128 registers a thread
constexpr int kMaxCluster = 16;         // blocks a cluster of the forward
constexpr int kBackwardCluster = 8;     // and of the backward: beyond, rows go faster by segments
constexpr int kRowsBlockThreads = 128;  // threads a block where several rows share one
constexpr int kSegmentThreads = 128;    // threads a block where rows are cut into segments
constexpr int kSegment = 4096;          // columns of a segment
constexpr int kColumnThreads = 512;     // threads a block of the kernel that finishes such rows by columns

// Vectors a thread of a team that has its blocks to itself. The backward holds x, dy and its share of dscale and dbias:
// more than 16 elements of each leave too few threads on a multiprocessor.
constexpr int kForwardVectors = 8;
constexpr int backward_vectors(int vector) { return 16 / vector; }

struct Plan {
  int threads_per_row;  // of one block: 8 or 32 where rows share a block, else the whole block
  int vectors;          // per thread, held in registers; kStreamed for a looped row
  int rows_per_block;
  int blocks_per_row;  // more than 1: a cluster
  int segments = 0;    // of a row that two kernels work on: one sums up each segment, one finishes column by column

  int block_threads() const { return threads_per_row * rows_per_block; }
  bool rows_share_block() const { return rows_per_block > 1; }
  const char* regime() const;
};

// `max_cluster`: the largest cluster the device can launch, 1 where it has none.
Plan make_plan(Op op, Dtype x, int64_t cols, int max_cluster);

// How many segments' sums a row may need in the backward on any device; 0 where it never is cut into segments.
int row_segments(Dtype x, int64_t cols);

// How many partial rows of dscale and dbias the backward has room for: on every GPU the same, being part of the shapes.
int64_t partial_rows(Kind kind, Dtype x, int64_t cols);

}  // namespace jaxnorm::cuda
