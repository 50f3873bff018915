// Sums of rows by the numbers of segments, as the gradient of an embedding takes them:
//
//   sums[v] = sum of data[i] over the positions i with ids[i] = v, in f32, in an order that ids alone say; rounded once
//
// A position whose number is not in [0, segments) is in no sum. Sums may be added to what is there, in f32 before the
// rounding, too; a row without positions stays as it is then, and is not read.
#pragma once

#include "operands.h"

namespace jaxnorm {

// Of positions, and of segments: so that int32 counts what a kernel looks ahead, too.
constexpr int64_t kMostSegments = (int64_t{1} << 31) - (1 << 10);

struct SegmentSum {
  int32_t positions, segments;
  int64_t cols;
  Input data;            // positions * cols
  const int32_t* ids;    // positions; on CUDA ascending
  const int32_t* order;  // the row of data that belongs to each of ids; may be absent: they are in order
  Output sums;           // segments * cols
  bool is_added;         // to onto
  Input onto;            // segments * cols, of sums' dtype, in sums' place where XLA has it so
  Workspace workspace;
};

namespace cpu {

// std::bad_alloc: there is no memory for the order of positions.
void run(const SegmentSum& p, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

Outcome run(const SegmentSum& p, Stream stream);

// The sums of segments that chunks share; a row is one of what chunks are made of, a position or a segment. Where sums
// are added it is a position.
WorkspaceSize segment_sum_workspace(const WorkspaceQuery& query);

}  // namespace cuda

}  // namespace jaxnorm
