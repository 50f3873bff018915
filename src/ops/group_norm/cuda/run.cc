// The plan of GroupNorm's kernels, how large a workspace they want, and from a call to the code for its dtype.
#include <algorithm>

#include "engine/cuda/device.h"
#include "ops/group_norm/cuda.h"

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

cudaError_t run(const GroupNormForward& p, cudaStream_t stream) {
  if (p.examples == 0) return cudaSuccess;
  const GroupPlan plan = group_plan_of(p);
  if (plan.chunks == 0) return cudaErrorMemoryAllocation;
  return with_dtype(p.x.dtype, [&](auto type) { return run_group_norm<decltype(type)>(p, plan, stream); });
}

cudaError_t run(const GroupNormBackward& p, cudaStream_t stream) {
  const GroupPlan plan = group_plan_of(p);
  if (plan.chunks == 0 && p.examples > 0) return cudaErrorMemoryAllocation;
  return with_dtype(p.x.dtype, [&](auto type) { return run_group_norm_grad<decltype(type)>(p, plan, stream); });
}

WorkspaceSize group_norm_workspace(const WorkspaceQuery& query) {
  const auto [groups, group_size] = query.weight_rows;
  return {make_group_plan(query.cols / group_size, groups, group_size).floats_a_group, 0};
}

}  // namespace jaxnorm::cuda
