#include "engine/cuda/grad_schedule.h"

#include <algorithm>
#include <climits>
#include <numeric>

namespace jaxnorm::cuda {
namespace {

bool has_neighbours(RowMap weight_rows) { return weight_rows.count > 1 && weight_rows.inner > 1; }

// Of how many blocks the groups have every weight row equally often, and of how many weight rows a block has rows.
int64_t blocks_of_cycle(RowMap weight_rows, int block_rows) {
  return weight_rows.count / std::gcd(weight_rows.count, int64_t{block_rows});
}
int64_t sums_of_block(RowMap weight_rows, int block_rows) { return std::min<int64_t>(weight_rows.count, block_rows); }

}  // namespace

int64_t least_partial_rows(RowMap weight_rows, int block_rows) {
  if (has_neighbours(weight_rows)) return 1;
  return blocks_of_cycle(weight_rows, block_rows) * sums_of_block(weight_rows, block_rows) / weight_rows.count;
}

RowSchedule schedule_rows(const ScheduleQuery& query) {
  const auto& [blocks, rows, weight_rows, block_rows, room] = query;
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

int64_t grad_blocks_at_once(Dtype x, int64_t cols) {
  const Plan plan = make_plan(Way::backward, Kind::rms, x, cols, kMaxCluster);
  if (plan.vectors == kStreamed) return rows_of_column_blocks(x, cols);
  // In clusters of 8 and 16 the remainders of a chip's GPCs stay idle.
  switch (plan.blocks_per_row) {
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
  room.schedule = schedule_rows({grad_blocks_at_once(x, cols), rows, weight_rows, block_rows, most});
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
  for (const Plan& plan : plans) {
    const ScheduleQuery any_rows{blocks, INT64_MAX / 2, query.weight_rows, plan.rows_per_block, INT64_MAX};
    most = std::max(most, schedule_rows(any_rows).partial_rows);
  }
  // Without clusters, which some devices do not have, rows are in segments soonest.
  const Plan without_clusters = make_plan(Way::backward, Kind::rms, query.dtype, query.cols, 1);
  return {query.with_dx ? int64_t{2} * without_clusters.segments : 0,
          query.weights * most * query.weight_rows.count * query.cols};
}

}  // namespace jaxnorm::cuda
