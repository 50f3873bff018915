// The plans of gated norms and of gradients, and how gradients share out rows among blocks and what they keep in their
// workspace: pure functions of shapes and dtypes, as those of engine/cuda/plan.h.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "engine/cuda/partials.h"
#include "engine/cuda/plan.h"
#include "ops/norm/call.h"

namespace jaxnorm::cuda {

// Gated rows, of up to kGatedCols. FIRST: the gate is applied before the statistics, and not kept.
template <int BYTES, bool FIRST>
struct GatedForwardRegimes {
  static constexpr auto kTable = kShortRows<BYTES> + kTwoArrayRows<BYTES>;
};
template <>
struct GatedForwardRegimes<2, true> {
  static constexpr RegimeTable<1> kBlock{{{kWholeBlock, 4, 1, kMaxThreads, kMaxThreads, false}}};
  static constexpr auto kTable = kShortRows<2> + kBlock;
};

// The plan of a norm of `stream_dtype`.
Plan forward_plan(const NormOperands& p, Dtype stream_dtype);

// `first`: as in Gate.
Plan make_gated_forward_plan(Dtype x, int64_t cols, bool first);

// Elements a thread in the backward, which has a float of scale, dscale and dbias for each.
constexpr int kElements = 16;

constexpr int kWideThreads = 640;     // threads a block of rows that would leave many of kMaxThreads idle: 96 registers
constexpr int kThinThreads = 768;     // or, where each has one vector: 80
constexpr int kSegmentThreads = 128;  // threads a block where rows are cut into segments
constexpr int kSegment = 4096;        // columns of a segment
constexpr int kColumnThreads = 512;   // threads a block of the kernel that finishes such rows by columns

Plan make_backward_plan(Dtype x, int64_t cols, int max_cluster);

// That with a third array, from the one without: enough is on its way with fewer rows.
Plan beside_extra_operand(Plan plan);

// That of a gated norm, whose rows are never cut into segments.
Plan make_gated_backward_plan(Dtype x, int64_t cols, int max_cluster);

// A grid-stride schedule: each block, or cluster, goes through groups of neighbouring rows, one row for each of its
// thread groups, that lie equally far apart, so that each thread group keeps its weight row. For that, the groups that
// all blocks have at once
//   have every weight row equally often, where neighbouring rows are of different ones;
//   are, block by block, of one weight row, where neighbours are of the same (inner > 1). The rows of a weight row are
//   counted for themselves then.
// With the schedule goes the number of partial rows that the blocks leave, each of weight_rows.count * cols sums.
struct RowSchedule {
  int64_t blocks = 0, partial_rows = 0;
  int64_t stride = 0, end = 0;  // rows from a group of a block to its next, and how many there are
  int sums = 1;                 // of different weight rows, that a block leaves
};

// How many rows of blocks the kernel has that finishes rows in segments column by column, each with a partial row.
int64_t rows_of_column_blocks(Dtype x, int64_t cols);

// What a call computes that takes room.
struct GradNeeds {
  bool dscale, dbias;
  int segments;  // a row, whose sums are kept; 0: none
};

// How a call goes about its rows, and where in its workspace is what: partial sums of dscale, then of dbias, then pairs
// of sums of each segment of a row. In this order, parts of rows that vectors divide are as aligned as the workspace.
struct GradRoom {
  RowSchedule schedule;
  Partials partials;
  float* row_sums = nullptr;
  int segments = 0;  // a row; of less room than they want, fewer and longer ones
};

// cudaErrorMemoryAllocation: there is too little room for one partial row of each weight, or one segment a row.
// cudaErrorInvalidConfiguration: a grid cannot have so many blocks.
cudaError_t make_room(const Workspace& workspace, const GradNeeds& needs, const Plan& plan, Dtype x, int64_t rows,
                      int64_t cols, RowMap weight_rows, GradRoom& room);

// How large a workspace a call wants, of any of these plans.
WorkspaceSize grad_workspace(const WorkspaceQuery& query, std::initializer_list<Plan> plans);

}  // namespace jaxnorm::cuda
