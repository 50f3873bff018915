#include "cuda/engine/plan.h"

#include <algorithm>

namespace jaxnorm::cuda {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The smallest of 1, 2, 4, 8 that is at least `value`.
constexpr int power_of_two(int64_t value) { return value <= 1 ? 1 : value <= 2 ? 2 : value <= 4 ? 4 : 8; }

// A row of `row` vectors in whole warps of as many blocks as `blocks`; `threads`: as many of a block as rows may share.
Plan whole_warps(int64_t row, int vectors, int blocks, int threads = 0) {
  const int per_row = static_cast<int>(ceil_div(ceil_div(ceil_div(row, blocks), vectors), kWarp)) * kWarp;
  return {per_row, vectors, std::max(1, threads / per_row), blocks};
}

Plan forward_plan(Kind kind, Dtype x, int64_t cols, int64_t row, int max_cluster) {
  for (const int threads : {8, kWarp})
    if (row <= 4 * threads) {
      const int vectors = std::max(threads == kWarp ? 2 : 1, power_of_two(ceil_div(row, threads)));
      return {threads, vectors, kRowsThreads / threads, 1};
    }
  // Layer norm of f32 is faster with twice the vectors than with more than 256 threads, unless it goes by elements.
  const bool small_blocks = kind == Kind::layer && cols % vector_of(x) == 0;
  for (const int vectors : {4, 8}) {
    const int threads = small_blocks && vectors == 4 ? kMaxThreads / 2 : max_forward_threads(x);
    if (row <= int64_t{vectors} * threads) return whole_warps(row, vectors, 1);
  }
  for (const int vectors : {4, 8})
    for (int blocks = 2; blocks <= max_cluster; blocks *= 2)
      if (row <= int64_t{vectors} * kMaxThreads * blocks) return whole_warps(row, vectors, blocks);
  return {kMaxThreads, kStreamed, 1, std::min(max_cluster, 8)};
}

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

Plan backward_plan(Kind kind, int64_t row, int64_t cols, int vector, int max_cluster) {
  const int most = kElements / vector;
  for (const int threads : {8, 16, kWarp})
    if (row <= threads * most) {
      const int vectors = std::min(most, power_of_two(ceil_div(row, threads)));
      return {threads, vectors, kMaxThreads / threads, 1};
    }
  if (row <= int64_t{most} * kMaxThreads) return backward_block(row, most, cols % vector == 0);
  for (int blocks = 2; blocks <= max_cluster; blocks *= 2)
    if (row <= int64_t{most} * kMaxThreads * blocks) return whole_warps(row, most, blocks);
  // Longer rows have twice as many elements a thread, for whose sums layer norm has no registers. What shared memory
  // holds one row of, f32, may still have to be cut into segments, beside a dy of another type.
  const bool f32 = vector == vector_of(Dtype::f32);
  const int segments = static_cast<int>(ceil_div(cols, kSegment));
  if (kind == Kind::rms && max_cluster == kMaxCluster && row <= int64_t{2 * most} * kMaxThreads * kMaxCluster) {
    Plan plan = whole_warps(row, 2 * most, kMaxCluster);
    plan.segments = f32 ? segments : 0;
    return plan;
  }
  return {kSegmentThreads, kStreamed, 1, 1, segments};
}

}  // namespace

const char* Plan::regime() const {
  if (vectors == kStreamed) return segments > 0 ? "segments" : "looped";
  if (blocks_per_row > 1) return "cluster per row";
  return rows_per_block > 1 ? "rows per block" : "block per row";
}

Plan make_plan(Op op, Kind kind, Dtype x, int64_t cols, int max_cluster) {
  const int vector = vector_of(x);
  const int64_t row = ceil_div(cols, vector);
  return op == Op::forward ? forward_plan(kind, x, cols, row, max_cluster)
                           : backward_plan(kind, row, cols, vector, max_cluster);
}

Plan beside_extra_operand(Plan plan) {
  if (plan.vectors > 1 && plan.block_threads() > kMaxThreads) plan.rows_per_block = kMaxThreads / plan.threads_per_row;
  return plan;
}

Plan make_gated_forward_plan(Dtype x, int64_t cols, bool first) {
  const Plan plan = make_plan(Op::forward, Kind::rms, x, cols, 1);
  if (x == Dtype::f32 || plan.vectors <= 4) return plan;
  // A thread of a half type has no room for eight vectors and their gates: as few vectors as ever, of more threads, as
  // far as these leave room for two blocks.
  const Plan more = whole_warps(ceil_div(cols, vector_of(x)), 4, 1);
  return first || more.threads_per_row <= kGatedThreads ? more : plan;
}

Plan make_gated_backward_plan(Dtype x, int64_t cols, int max_cluster) {
  const Plan plan = make_plan(Op::backward, Kind::rms, x, cols, max_cluster);
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

bool has_tickets(Kind kind, Dtype x, int64_t cols) {
  const Plan plan = make_plan(Op::forward, kind, x, cols, kMaxCluster);
  return is_dynamic(kind, x) && plan.blocks_per_row > 1 && plan.vectors != kStreamed && cols % vector_of(x) == 0;
}

}  // namespace jaxnorm::cuda
