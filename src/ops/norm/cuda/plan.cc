#include "ops/norm/cuda/plan.h"

#include <algorithm>
#include <climits>
#include <numeric>

#include "engine/cuda/plan.h"

namespace jaxnorm::cuda {
namespace {

static_assert(plan_from(GatedForwardRegimes<2, true>::kTable, false, Dtype::bf16, kGatedCols, 1).entry >= 0);
static_assert(plan_from(GatedForwardRegimes<2, false>::kTable, false, Dtype::bf16, kGatedCols, 1).entry >= 0);
static_assert(plan_from(GatedForwardRegimes<4, true>::kTable, false, Dtype::f32, kGatedCols, 1).entry >= 0);

// The smallest of 1, 2, 4, 8 that is at least `value`.
constexpr int power_of_two(int64_t value) { return value <= 1 ? 1 : value <= 2 ? 2 : value <= 4 ? 4 : 8; }

// A row of `row` vectors in whole warps of one block. A thread has up to `most` of them.
Plan backward_block(int64_t row, int most, bool is_divided) {
  const Plan plan = whole_warps(row, most, 1, kMaxThreads);
  if (most > 2 || !is_divided) return plan;
  // Of half types a block may have too few threads with something to do. Where two warps a row are more than it fills,
  // three of one vector a thread are not; elsewhere more rows get a thread group.
  if (row <= 3 * kWarp) return whole_warps(row, 1, 1, kThinThreads);
  const Plan wide = whole_warps(row, most, 1, kWideThreads);
  const bool is_idle = plan.rows_per_block * row < int64_t{most} * kMaxThreads * 3 / 4;
  return is_idle && wide.rows_per_block > plan.rows_per_block ? wide : plan;
}

bool has_neighbours(RowMap weight_rows) { return weight_rows.count > 1 && weight_rows.inner > 1; }

// Of how many blocks the groups have every weight row equally often, and of how many weight rows a block has rows.
int64_t blocks_of_cycle(RowMap weight_rows, int block_rows) {
  return weight_rows.count / std::gcd(weight_rows.count, int64_t{block_rows});
}
int64_t sums_of_block(RowMap weight_rows, int block_rows) { return std::min<int64_t>(weight_rows.count, block_rows); }

// Of less room than this nothing is scheduled.
int64_t least_partial_rows(RowMap weight_rows, int block_rows) {
  if (has_neighbours(weight_rows)) return 1;
  return blocks_of_cycle(weight_rows, block_rows) * sums_of_block(weight_rows, block_rows) / weight_rows.count;
}

// `blocks`: that run at once. `room`: for how many partial rows.
RowSchedule schedule_rows(int64_t blocks, int64_t rows, RowMap weight_rows, int block_rows, int64_t room) {
  if (has_neighbours(weight_rows)) {
    const int64_t own_rows = rows / weight_rows.count, most = std::max<int64_t>(1, blocks / weight_rows.count);
    const int64_t used = std::min({ceil_div(own_rows, block_rows), most, room});
    return {used * weight_rows.count, used, used * block_rows, own_rows, 1};
  }
  const int64_t cycle = blocks_of_cycle(weight_rows, block_rows), sums = sums_of_block(weight_rows, block_rows);
  const int64_t cycles = std::min({std::max<int64_t>(1, blocks / cycle), ceil_div(ceil_div(rows, block_rows), cycle),
                                   room / least_partial_rows(weight_rows, block_rows)});
  const int64_t used = cycles * cycle;
  return {used, used * sums / weight_rows.count, used * block_rows, rows, static_cast<int>(sums)};
}

// How many blocks, or clusters, run at once: the same on every GPU, so that dscale is.
int64_t grad_blocks_at_once(Dtype x, int64_t cols) {
  constexpr int64_t longest_of_cluster = int64_t{kElements} * kMaxThreads * kMaxCluster;
  // Rows of up to twice that have as many partial rows as those of the largest clusters: programs that were exported
  // have room for no more.
  if (cols > 2 * longest_of_cluster) return rows_of_column_blocks(x, cols);
  const Plan plan = make_backward_plan(x, cols, kMaxCluster);
  // In clusters of 8 and 16 the remainders of a chip's GPCs stay idle.
  switch (plan.segments > 0 ? kMaxCluster : plan.blocks_per_row) {
    case 16:
      return 7;
    case 8:
      return 15;
    case 4:
      return 30;
    default:
      return kMultiprocessors / plan.blocks_per_row;
  }
}

// What the table of a forward leaves a thread.
int forward_registers(const PlanQuestion& asked, const Plan& plan) {
  constexpr int of_pipelines = 128;
  if (plan.blocks_per_row > 1 && plan.vectors != kStreamed) return of_pipelines;
  const auto budget = [&](const ForwardRegime* table) {
    const Registers& registers = table[plan.entry].registers;
    if (asked.is_gated || asked.adds) return registers.two_arrays;
    return asked.centred || asked.cols % vector_of(asked.x) != 0 ? registers.one_array : registers.weights;
  };
  if (!asked.is_gated)
    return asked.x == Dtype::f32 ? budget(ForwardRegimes<4>::kTable.entry) : budget(ForwardRegimes<2>::kTable.entry);
  if (asked.x == Dtype::f32) return budget(GatedForwardRegimes<4, true>::kTable.entry);
  return asked.gate_first ? budget(GatedForwardRegimes<2, true>::kTable.entry)
                          : budget(GatedForwardRegimes<2, false>::kTable.entry);
}

// As many as the most threads of a block leave.
int backward_registers(const Plan& plan) {
  constexpr int of_multiprocessor = 64 << 10, unlimited = 255;
  if (plan.segments > 0) return of_multiprocessor / (2 * kColumnThreads);
  for (const int most : {kMaxThreads, kWideThreads, kThinThreads})
    if (plan.block_threads() <= most) return of_multiprocessor / most / 8 * 8;
  return unlimited;
}

}  // namespace

Plan make_gated_forward_plan(Dtype x, int64_t cols, bool first) {
  const auto plan = [&](const auto& table) { return plan_from(table, false, x, cols, 1); };
  if (x == Dtype::f32) return plan(GatedForwardRegimes<4, true>::kTable);
  return first ? plan(GatedForwardRegimes<2, true>::kTable) : plan(GatedForwardRegimes<2, false>::kTable);
}

Plan make_backward_plan(Dtype x, int64_t cols, int max_cluster) {
  const int vector = vector_of(x), most = kElements / vector;
  const int64_t row = ceil_div(cols, vector);
  for (const int threads : {8, 16, kWarp})
    if (row <= threads * most) {
      const int vectors = std::min(most, power_of_two(ceil_div(row, threads)));
      return {threads, vectors, kMaxThreads / threads, 1};
    }
  if (row <= int64_t{most} * kMaxThreads) return backward_block(row, most, cols % vector == 0);
  for (int blocks = 2; blocks <= max_cluster; blocks *= 2)
    if (row <= int64_t{most} * kMaxThreads * blocks) return whole_warps(row, most, blocks);
  return {kSegmentThreads, kStreamed, 1, 1, static_cast<int>(ceil_div(cols, kSegment))};
}

Plan beside_extra_operand(Plan plan) {
  if (plan.vectors > 1 && plan.block_threads() > kMaxThreads) plan.rows_per_block = kMaxThreads / plan.threads_per_row;
  return plan;
}

Plan make_gated_backward_plan(Dtype x, int64_t cols, int max_cluster) {
  const Plan plan = make_backward_plan(x, cols, max_cluster);
  const int vector = vector_of(x), most = kElements / vector;
  const int64_t row = ceil_div(cols, vector);
  if (plan.segments > 0) return whole_warps(row, 2 * most, 1);
  if (plan.blocks_per_row > 1) return plan;
  // Half types have much to compute, for which more threads wait less.
  if (most == 2 && row <= kThinThreads) {
    for (const int threads : {8, 16, kWarp})
      if (row <= threads) return {threads, 1, kThinThreads / threads, 1};
    return whole_warps(row, 1, 1, kThinThreads);
  }
  return plan.threads_per_row <= kWarp ? plan : whole_warps(row, most, 1, kMaxThreads);
}

std::optional<PlanAnswer> answer(const PlanQuestion& asked) {
  const auto& [forward, centred, x, cols, max_cluster, is_gated, gate_first, adds] = asked;
  if (is_gated && (centred || cols > kGatedCols)) return std::nullopt;
  if (forward) {
    const Plan plan =
        is_gated ? make_gated_forward_plan(x, cols, gate_first) : make_forward_plan(centred, x, cols, max_cluster);
    const int rows = rows_at_once(plan.threads_per_row, plan.vectors, is_gated || adds ? 2 : 1);
    return PlanAnswer{plan, rows, forward_registers(asked, plan)};
  }
  Plan plan = is_gated ? make_gated_backward_plan(x, cols, max_cluster) : make_backward_plan(x, cols, max_cluster);
  if (adds) plan = beside_extra_operand(plan);
  return PlanAnswer{plan, 1, backward_registers(plan)};
}

int64_t rows_of_column_blocks(Dtype x, int64_t cols) {
  // About two blocks a multiprocessor.
  return std::clamp<int64_t>(2 * kMultiprocessors * kColumnThreads * vector_of(x) / cols, 4, 64);
}

cudaError_t make_room(const Workspace& workspace, const GradNeeds& needs, const Plan& plan, Dtype x, int64_t rows,
                      int64_t cols, RowMap weight_rows, GradRoom& room) {
  room = {};
  if (rows == 0) return cudaSuccess;
  const int weights = needs.dscale + needs.dbias, block_rows = plan.rows_per_block;
  const int64_t partial_row = weight_rows.count * cols;
  // What is left by the fewest partial rows is for segments, and what these leave for more partial rows.
  const int64_t left = workspace.floats - weights * partial_row * least_partial_rows(weight_rows, block_rows);
  if (left < (needs.segments > 0 ? 2 * rows : 0)) return cudaErrorMemoryAllocation;
  if (needs.segments > 0) {
    const int64_t most = std::min<int64_t>(needs.segments, left / (2 * rows));
    room.segments = static_cast<int>(ceil_div(needs.segments, ceil_div(needs.segments, most)));
  }
  const int64_t for_partials = workspace.floats - 2 * rows * room.segments;
  const int64_t most = weights > 0 ? for_partials / (weights * partial_row) : INT64_MAX;
  room.schedule = schedule_rows(grad_blocks_at_once(x, cols), rows, weight_rows, block_rows, most);
  if (room.schedule.blocks > INT_MAX / plan.blocks_per_row) return cudaErrorInvalidConfiguration;

  const int64_t of_weight = room.schedule.partial_rows * partial_row;
  room.partials.rows = room.schedule.partial_rows;
  if (needs.dscale) room.partials.dscale = workspace.data;
  if (needs.dbias) room.partials.dbias = workspace.data + (needs.dscale ? of_weight : 0);
  if (room.segments > 0) room.row_sums = workspace.data + weights * of_weight;
  return cudaSuccess;
}

WorkspaceSize grad_workspace(const WorkspaceQuery& query, std::initializer_list<Plan> plans) {
  const int64_t blocks = grad_blocks_at_once(query.dtype, query.cols);
  int64_t most = 0;
  for (const Plan& plan : plans)
    most = std::max(
        most, schedule_rows(blocks, INT64_MAX / 2, query.weight_rows, plan.rows_per_block, INT64_MAX).partial_rows);
  // Without clusters, which some devices do not have, rows are in segments soonest.
  const Plan without_clusters = make_backward_plan(query.dtype, query.cols, 1);
  return {query.with_dx ? int64_t{2} * without_clusters.segments : 0,
          query.weights * most * query.weight_rows.count * query.cols};
}

}  // namespace jaxnorm::cuda
