// Two more loops of clusters whose rows come by way of pipelines, for ops that keep a row, or two, in registers.
#pragma once

#include "engine/cuda/row_op.cuh"

namespace jaxnorm::cuda {

// As pipelined_rows, with the row in registers: shared memory has only rows that come. Their room is filled again at
// once, and the exchange is waited for meanwhile. So there is room for rows of which shared memory has no more than
// one.
template <typename Op, typename R, Access ACCESS>
__device__ __forceinline__ void held_rows(const typename Op::Params& p, const typename Op::Launch& launch,
                                          char* shared) {
  using Stats = typename Op::Stats;
  using Tile = typename Op::template Tile<R, ACCESS>;
  using Load = typename Op::template Load<Tile>;
  ThreadGroup<R::kThreads, typename Stats::Part, R::kCluster> group(launch.threads_per_row, p.cols, launch.span,
                                                                    launch.reciprocal_cols);
  const Rows rows = launch.backwards(group.index, 1);
  auto pipeline = Load::pipeline(p, group, launch.pipeline, shared, rows);
  typename Op::template PipelinedEpilogue<R, Tile> epilogue(p, group, shared);
  pipeline.acquire_rest();
  const float cols = warp_cols<Tile>(group);
  for (int64_t row = rows.start(0); rows.has(row); row += rows.step) {
    typename Load::Fragment x;
    pipeline.wait();
    Load::newest(x, p, group, pipeline, row);
    pipeline.release();
    group.publish(Stats::template warp_part<Tile>(x, group, cols));
    pipeline.synced();
    const auto s = collect_statistics<Stats, false>(p, group, row);
    epilogue.template finish<Load>(p, launch, group, s, row, x);
  }
}

// The same with two rows in registers: while the blocks of a cluster exchange the statistics of one, they have those of
// the next to compute. A row's place is filled again once its statistics are known, as a ticket may come with them.
template <typename Op, typename R, Access ACCESS>
__device__ __forceinline__ void rows_ahead(const typename Op::Params& p, const typename Op::Launch& launch,
                                           char* shared) {
  using Stats = typename Op::Stats;
  using Tile = typename Op::template Tile<R, ACCESS>;
  using Load = typename Op::template Load<Tile>;
  constexpr bool kDynamic = Op::template kDynamic<ACCESS>;
  using Part = std::conditional_t<kDynamic, typename Stats::TicketPart, typename Stats::Part>;
  ThreadGroup<R::kThreads, Part, R::kCluster> group(launch.threads_per_row, p.cols, launch.span,
                                                    launch.reciprocal_cols);
  const auto rows = launch.template cluster_rows<kDynamic>(group.index);
  auto pipeline = Load::pipeline(p, group, launch.pipeline, shared, rows);
  typename Op::template PipelinedEpilogue<R, Tile> epilogue(p, group, shared);
  pipeline.acquire_rest();
  const float cols = warp_cols<Tile>(group);
  typename Load::Fragment x, coming;
  [[maybe_unused]] float ticket = 0;
  if constexpr (kDynamic) ticket = rows.take_ticket(group);
  int64_t row = -1, next = rows.start(0), after = -1;
  for (; row >= 0 || next >= 0; row = next, next = after, x = coming) {
    if (next >= 0) {
      pipeline.wait();
      Load::newest(coming, p, group, pipeline, next);
      group.publish(Stats::template warp_part<Tile>(coming, group, cols), ticket);
      if constexpr (kDynamic) {
        ticket = rows.take_ticket(group);
        after = pipeline.upcoming_row();
      } else {
        after = next + rows.step;
      }
    }
    if (row < 0) continue;
    const auto s = collect_statistics<Stats, false>(p, group, row);
    if constexpr (kDynamic) pipeline.ticket(group.ticket());
    pipeline.release();
    pipeline.synced();
    epilogue.template finish<Load>(p, launch, group, s, row, x);
  }
}

}  // namespace jaxnorm::cuda
