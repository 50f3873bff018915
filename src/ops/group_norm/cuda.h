// How the kernels of GroupNorm share x among blocks, and what they keep between launches.
//
// x is read twice. Of a tile, a chunk of an example's positions and a slice of its channels, a block gives what each
// channel comes down to; then follows what a group comes down to; and with that y or dx. The last launch begins where
// the first ended, so that it finds in the cache what that read last.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "engine/cuda/plan.h"
#include "ops/group_norm/call.h"

namespace jaxnorm::cuda {

constexpr int kGroupThreads = 256;
constexpr int kGroupVector = 4;  // channels of a thread: of more a thread has too many numbers to keep
constexpr int kGroupWidth = 32;  // threads side by side at most
constexpr int kGroupAtOnce = 8;  // positions that a thread reads at once

// A chunk has twice what its threads read at once, and of an example with more chunks than are few up to four times
// that, or more where there would be too many.
constexpr int64_t kFewChunks = 128, kMostChunks = 2048;

struct GroupPlan {
  int64_t positions, channels;
  int64_t chunk = 0;           // positions of a chunk, of which the last may be shorter
  int chunks = 0, slices = 0;  // of an example
  int width = 0;               // threads side by side, a power of two
  int64_t floats_a_group = 0;  // of the workspace

  int64_t tiles(int64_t examples) const { return examples * chunks * slices; }
};

// From the shapes alone, and never the number of examples. Two numbers are kept for each channel of a chunk, and two
// for a group. `floats_a_group`: what there is room for; fewer chunks do with less of it. No chunks: there is too
// little.
GroupPlan make_group_plan(int64_t positions, int64_t groups, int64_t group_size, int64_t floats_a_group = INT64_MAX);

// cudaErrorMemoryAllocation: the workspace has too little room for any way to compute the op.
cudaError_t run(const GroupNormForward& p, cudaStream_t stream);
cudaError_t run(const GroupNormBackward& p, cudaStream_t stream);

// By the type of x, with a plan that has chunks, or of no examples.
template <typename X>
cudaError_t run_group_norm(const GroupNormForward& p, const GroupPlan& plan, cudaStream_t stream);
template <typename X>
cudaError_t run_group_norm_grad(const GroupNormBackward& p, const GroupPlan& plan, cudaStream_t stream);

// Between their passes, in the workspace: mean and rstd; and the means of groups, and each example's sums over a
// channel, which the gradients of weights are sums of.
cudaError_t merge_group_moments(const GroupNormForward& p, const GroupPlan& plan, cudaStream_t stream);
cudaError_t merge_group_sums(const GroupNormBackward& p, const GroupPlan& plan, cudaStream_t stream);

// The plan of a call, whose workspace may have another size than the plan wants.
template <typename Op>
GroupPlan group_plan_of(const Op& p) {
  const int64_t rows = p.examples * p.groups;
  return make_group_plan(p.positions, p.groups, p.group_size, rows > 0 ? p.workspace.floats / rows : 0);
}

// Where the workspace has the two numbers for each channel of each chunk of each example, and those for each group.
struct GroupParts {
  float2 *of_channels, *of_groups;

  template <typename Op>
  GroupParts(const Op& p, const GroupPlan& plan)
      : of_channels(reinterpret_cast<float2*>(p.workspace.data)),
        of_groups(of_channels + p.examples * plan.chunks * plan.channels) {}
};

}  // namespace jaxnorm::cuda
