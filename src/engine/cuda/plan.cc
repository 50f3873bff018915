#include "engine/cuda/plan.h"

#include <algorithm>

#include "engine/cuda/regimes.h"
#include "ops/norm/gated.h"

namespace jaxnorm::cuda {
namespace {

// The smallest of 1, 2, 4, 8 that is at least `value`.
constexpr int power_of_two(int64_t value) { return value <= 1 ? 1 : value <= 2 ? 2 : value <= 4 ? 4 : 8; }

// A row of `row` vectors in whole warps of as many blocks as `blocks`; `threads`: as many of a block as rows may share.
constexpr Plan whole_warps(int64_t row, int vectors, int blocks, int threads = 0) {
  const int per_row = static_cast<int>(ceil_div(ceil_div(ceil_div(row, blocks), vectors), kWarp)) * kWarp;
  return {per_row, vectors, std::max(1, threads / per_row), blocks};
}

// The plan of the first regime of a table that has room for a row. `centred`: its statistics have a mean.
template <size_t SIZE>
constexpr Plan forward_plan(const RegimeTable<SIZE>& table, bool centred, Dtype x, int64_t cols, int max_cluster) {
  const int64_t row = ceil_div(cols, vector_of(x));
  const bool is_divided = cols % vector_of(x) == 0;
  for (int i = 0; i < table.kSize; ++i) {
    const ForwardRegime& regime = table.entry[i];
    if (regime.divided_only && !is_divided) continue;
    if (regime.vectors == kStreamed) {
      if (regime.blocks > 1 && max_cluster == 1) continue;
      return {regime.block_threads, kStreamed, 1, std::min(max_cluster, regime.blocks), 0, i};
    }
    if (regime.threads > 0) {
      if (row <= int64_t{regime.vectors} * regime.threads)
        return {regime.threads, regime.vectors, regime.block_threads / regime.threads, 1, 0, i};
      continue;
    }
    const int threads = centred && is_divided ? regime.centred_threads : regime.block_threads;
    for (int blocks = regime.blocks > 1 ? 2 : 1; blocks <= std::min(regime.blocks, max_cluster); blocks *= 2)
      if (row <= int64_t{regime.vectors} * threads * blocks) {
        Plan plan = whole_warps(row, regime.vectors, blocks);
        plan.entry = i;
        return plan;
      }
  }
  return {};
}

// Each of these tables has a regime for every row: its last one has room for the longest.
constexpr int64_t longest = int64_t{1} << 50;
static_assert(forward_plan(ForwardRegimes<2>::kTable, false, Dtype::bf16, longest, 1).entry >= 0);
static_assert(forward_plan(ForwardRegimes<4>::kTable, true, Dtype::f32, longest, kMaxCluster).entry >= 0);
static_assert(forward_plan(OneBlockRegimes<2>::kTable, false, Dtype::bf16, longest, 1).entry >= 0);
static_assert(forward_plan(OneBlockRegimes<4>::kTable, false, Dtype::f32, longest, 1).entry >= 0);
static_assert(forward_plan(PairRegimes<2>::kTable, false, Dtype::bf16, longest, 1).entry >= 0);
static_assert(forward_plan(PairRegimes<4>::kTable, false, Dtype::f32, longest, kMaxCluster).entry >= 0);
static_assert(forward_plan(GatedForwardRegimes<2, true>::kTable, false, Dtype::bf16, kGatedCols, 1).entry >= 0);
static_assert(forward_plan(GatedForwardRegimes<2, false>::kTable, false, Dtype::bf16, kGatedCols, 1).entry >= 0);
static_assert(forward_plan(GatedForwardRegimes<4, true>::kTable, false, Dtype::f32, kGatedCols, 1).entry >= 0);

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

Plan make_plan(Way way, Kind kind, Dtype x, int64_t cols, int max_cluster) {
  const int vector = vector_of(x);
  if (way == Way::backward) return backward_plan(kind, ceil_div(cols, vector), cols, vector, max_cluster);
  const bool centred = kind == Kind::layer;
  return x == Dtype::f32 ? forward_plan(ForwardRegimes<4>::kTable, centred, x, cols, max_cluster)
                         : forward_plan(ForwardRegimes<2>::kTable, centred, x, cols, max_cluster);
}

Plan beside_extra_operand(Plan plan) {
  if (plan.vectors > 1 && plan.block_threads() > kMaxThreads) plan.rows_per_block = kMaxThreads / plan.threads_per_row;
  return plan;
}

Plan make_gated_forward_plan(Dtype x, int64_t cols, bool first) {
  const auto plan = [&](const auto& table) { return forward_plan(table, false, x, cols, 1); };
  if (x == Dtype::f32) return plan(GatedForwardRegimes<4, true>::kTable);
  return first ? plan(GatedForwardRegimes<2, true>::kTable) : plan(GatedForwardRegimes<2, false>::kTable);
}

Plan make_pair_plan(Dtype x, int64_t cols, int max_cluster) {
  return x == Dtype::f32 ? forward_plan(PairRegimes<4>::kTable, false, x, cols, max_cluster)
                         : forward_plan(PairRegimes<2>::kTable, false, x, cols, max_cluster);
}

Plan make_gated_backward_plan(Dtype x, int64_t cols, int max_cluster) {
  const Plan plan = make_plan(Way::backward, Kind::rms, x, cols, max_cluster);
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

Plan make_one_block_plan(Dtype x, int64_t cols) {
  return x == Dtype::f32 ? forward_plan(OneBlockRegimes<4>::kTable, false, x, cols, 1)
                         : forward_plan(OneBlockRegimes<2>::kTable, false, x, cols, 1);
}

Plan make_window_plan(Dtype x, int64_t cols) { return forward_plan(WindowRegimes::kTable, false, x, cols, 1); }

bool has_tickets(Kind kind, Dtype x, int64_t cols) {
  const Plan plan = make_plan(Way::forward, kind, x, cols, kMaxCluster);
  return is_dynamic(kind, x) && plan.blocks_per_row > 1 && plan.vectors != kStreamed && cols % vector_of(x) == 0;
}

}  // namespace jaxnorm::cuda
