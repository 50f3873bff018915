// The plan of GroupNorm's kernels, and how large a workspace they want.
#include "cuda/ops/group_norm.h"

#include <algorithm>

#include "cuda/ops.h"

namespace jaxnorm::cuda {

GroupPlan make_group_plan(int64_t positions, int64_t groups, int64_t group_size, int64_t floats_a_group) {
  GroupPlan plan{positions, groups * group_size};
  const int64_t vectors = ceil_div(plan.channels, kGroupVector);
  plan.width = 1;
  while (plan.width < kGroupWidth && plan.width < vectors) plan.width *= 2;
  plan.slices = static_cast<int>(ceil_div(vectors, plan.width));

  const int64_t room = std::max<int64_t>(0, floats_a_group / 2 - 1) / group_size;
  if (room < 1) return plan;
  const int64_t least = kGroupThreads / plan.width * kGroupAtOnce * 2;
  const auto are_more_than = [&](int64_t chunks) { return ceil_div(positions, plan.chunk) > chunks; };
  plan.chunk = least;
  while ((are_more_than(kFewChunks) && plan.chunk < 4 * least) || are_more_than(std::min(kMostChunks, room)))
    plan.chunk *= 2;
  plan.chunks = static_cast<int>(ceil_div(positions, plan.chunk));
  plan.floats_a_group = 2 * (plan.chunks * group_size + 1);
  return plan;
}

WorkspaceSize group_norm_forward_workspace(const WorkspaceQuery& query) {
  const auto [groups, group_size] = query.weight_rows;
  return {make_group_plan(query.cols / group_size, groups, group_size).floats_a_group, 0};
}

WorkspaceSize group_norm_backward_workspace(const WorkspaceQuery& query) { return group_norm_forward_workspace(query); }

}  // namespace jaxnorm::cuda
