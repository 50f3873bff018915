// The loops over rows that all forward ops go through: a direct one, and three of clusters whose rows come by way of
// pipelines.
//
// What an op is to them: a struct derived from RowOp, with
//
//   Params                          what its kernels know of a call: rows, cols and what its functors look at
//   Load<Tile>                      how rows reach a thread group (ops/shared/cuda/load.cuh)
//   Stats                           what has to be known of a whole row (ops/shared/cuda/stats.cuh)
//   Epilogue<R, Tile>               from a thread group's rows and their statistics, the results: of the direct loop,
//   PipelinedEpilogue<R, Tile>      and of the pipelined one
//
// An epilogue is made before the statistics are known, so that what it loads is on its way meanwhile.
#pragma once

#include "engine/cuda/fragment.cuh"
#include "engine/cuda/launch.cuh"

namespace jaxnorm::cuda {

// The rows that a thread group has under way at once. Those past the last row are not to be written.
template <typename Fragment, typename Statistics, int ROWS>
struct RowBatch {
  static constexpr int kRows = ROWS;
  Fragment x[ROWS];
  Statistics s[ROWS];
  const int64_t first, distance;
  const int64_t& end;  // the kernel's parameter: a copy would be kept in registers

  __device__ int64_t row(int r) const { return first + r * distance; }
  __device__ bool is_there(int r) const { return row(r) < end; }
  // The same, as there is a first row.
  __device__ bool is_written(int r) const { return r == 0 || is_there(r); }
  // Past the last row, the first one again.
  __device__ int64_t row_to_read(int r) const { return is_there(r) ? row(r) : first; }
};

// STREAM: the type of what is normalised, by whose vectors rows go. ARRAYS: of which a thread has a row at hand.
template <typename STREAM, typename STATS, int ARRAYS = 1>
struct RowOp {
  using Stream = STREAM;
  using Stats = STATS;
  using Launch = RowsLaunch;

  template <typename R, Access ACCESS>
  using Tile =
      std::conditional_t<ACCESS == Access::elementwise, RereadTiling<Stream, R, ACCESS>, Tiling<Stream, R, ACCESS>>;

  // Rows of a thread group under way at once.
  template <typename R>
  static constexpr int kRows = R::template kRows<ARRAYS>;

  // Registers of a thread; 0: as many as the compiler likes.
  template <typename R, Access ACCESS>
  static constexpr int kRegisters = kIsPipelined<ACCESS> ? 128
                                    : ARRAYS == 1        ? R::kRegisters.one_array
                                                         : R::kRegisters.two_arrays;

  // A grid holds a thread group for every row. Yet a loop keeps the compiler from having more under way than it has
  // registers for, where rows go by elements or have many vectors of two arrays.
  template <typename Tile>
  static constexpr bool kLoops = Tile::N == 1 || (ARRAYS > 1 && Tile::VECTORS == 8);

  // Whether clusters with pipelines draw tickets for their rows.
  template <Access ACCESS>
  static constexpr bool kDynamic = false;

  // Whether fragments of pipelined rows are in registers once they were read: see held_rows.
  static constexpr bool kHolds = false;

  // The same of two rows at once: see rows_ahead.
  template <typename R>
  static constexpr bool kHoldsTwo = false;
};

// What epilogues need only if they say so.
struct RowEpilogue {
  static constexpr int kSharedBytes = 0;   // of the direct loop: shared memory of a thread
  static constexpr bool kReduces = false;  // of the pipelined loop: whether it has a reduction of its own
};

// The statistics of a thread group's row, which its first thread writes where they are wanted. MAY_BE_PAST: whether the
// row may come after the last one.
template <typename Stats, bool MAY_BE_PAST, typename P, typename Group>
__device__ auto collect_statistics(const P& p, Group& group, int64_t row) {
  const auto s = Stats::finish(p, group.collect(), group.reciprocal());
  if (group.rank + group.begin == 0 && (!MAY_BE_PAST || row < p.rows)) Stats::write(p, s, row);
  return s;
}

template <typename Op, typename R, Access ACCESS>
__device__ __forceinline__ void direct_rows(const typename Op::Params& p, const typename Op::Launch& launch) {
  using Stats = typename Op::Stats;
  using Tile = typename Op::template Tile<R, ACCESS>;
  using Load = typename Op::template Load<Tile>;
  using Epilogue = typename Op::template Epilogue<R, Tile>;
  using Group = ThreadGroup<R::kThreads, typename Stats::Part, R::kCluster>;
  Group group(launch.threads_per_row, p.cols, launch.span, launch.reciprocal_cols);
  constexpr int kRows = Tile::KEPT ? Op::template kRows<R> : 1;
  const int64_t block_rows = R::kThreads == kWholeBlock ? 1 : launch.rows_per_block;
  int64_t first = group.index * kRows * block_rows + group.place;
  if (first >= p.rows) return;
  do {
    RowBatch<typename Load::Fragment, typename Stats::Statistics, kRows> rows{{}, {}, first, block_rows, p.rows};
    Load::read(p, group, rows);
    Epilogue epilogue(p, launch, group, rows);
    const float cols = warp_cols<Tile>(group);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      group.publish(Stats::template warp_part<Tile>(rows.x[r], group, cols));
      rows.s[r] = collect_statistics<Stats, true>(p, group, rows.row(r));
    }
    epilogue.finish(p, launch, group, rows);
    first += group.count * kRows * block_rows;
  } while (Op::template kLoops<Tile> && first < p.rows);
}

// As many clusters as run at once. While the blocks of a cluster exchange the statistics of one row, those of the next
// are under way. An epilogue that reduces once more has its own exchange between `begin` and `finish`, and the next
// row's statistics begin there.
template <typename Op, typename R, Access ACCESS>
__device__ __forceinline__ void pipelined_rows(const typename Op::Params& p, const typename Op::Launch& launch,
                                               char* shared) {
  using Stats = typename Op::Stats;
  using Tile = typename Op::template Tile<R, ACCESS>;
  using Load = typename Op::template Load<Tile>;
  using Epilogue = typename Op::template PipelinedEpilogue<R, Tile>;
  constexpr bool kDynamic = Op::template kDynamic<ACCESS>, kReduces = Epilogue::kReduces;
  using Part = std::conditional_t<kDynamic, typename Stats::TicketPart, typename Stats::Part>;
  ThreadGroup<R::kThreads, Part, R::kCluster> group(launch.threads_per_row, p.cols, launch.span,
                                                    launch.reciprocal_cols);
  const auto rows = launch.template cluster_rows<kDynamic>(group.index);
  auto pipeline = Load::pipeline(p, group, launch.pipeline, shared, rows);
  Epilogue epilogue(p, group, shared + launch.pipeline.template bytes_of_pipeline<decltype(pipeline)::kArrays>());
  pipeline.acquire_rest();
  epilogue.arrive(p);
  const float cols = warp_cols<Tile>(group);
  typename Load::Fragment x;

  int64_t row = -1, next = rows.start(0), after = -1;
  [[maybe_unused]] float ticket = 0;
  if constexpr (kDynamic) ticket = rows.take_ticket(group);
  const auto begin_statistics = [&] {
    pipeline.wait();
    Load::newest(x, p, group, pipeline, next);
    group.publish(Stats::template warp_part<Tile>(x, group, cols), ticket);
    pipeline.synced();
    if constexpr (kDynamic) {
      ticket = rows.take_ticket(group);
      after = pipeline.upcoming_row();
    } else {
      after = next + rows.step;
    }
  };
  if constexpr (kReduces) {
    if (next >= 0) begin_statistics();
    row = next, next += rows.step;
  }
  for (; row >= 0 || (!kReduces && next >= 0); row = next, next = kReduces ? next + rows.step : after) {
    if constexpr (!kReduces) {
      if (next >= 0) begin_statistics();
      if (row < 0) continue;
    }
    const auto s = collect_statistics<Stats, false>(p, group, row);
    if constexpr (kReduces) {
      epilogue.template begin<Load>(p, group, s, row, x);
      pipeline.release();
      epilogue.publish(p, group);
      if (next >= 0) begin_statistics();
      epilogue.finish(p, group, row);
    } else {
      Load::oldest(x, p, group, pipeline, row);
      epilogue.template finish<Load>(p, launch, group, s, row, x);
      if constexpr (kDynamic) pipeline.ticket(group.ticket());
      pipeline.release();
    }
  }
}

// As pipelined_rows, for ops that keep the row in registers: shared memory has only rows that come. Their room is
// filled again at once, and the exchange is waited for meanwhile. So there is room for rows of which shared memory has
// no more than one.
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

template <typename Op, typename R, Access ACCESS>
__global__ void __launch_bounds__(R::kMost, resident_blocks(Op::template kRegisters<R, ACCESS>, R::kMost))
    row_kernel(const __grid_constant__ typename Op::Params p, const __grid_constant__ typename Op::Launch launch) {
  if constexpr (R::kCluster > 1 && !kHasClusters) {
    return;
  } else if constexpr (kIsPipelined<ACCESS> && Op::kHolds) {
    held_rows<Op, R, ACCESS>(p, launch, dynamic_shared());
  } else if constexpr (kIsPipelined<ACCESS> && Op::template kHoldsTwo<R>) {
    rows_ahead<Op, R, ACCESS>(p, launch, dynamic_shared());
  } else if constexpr (kIsPipelined<ACCESS>) {
    pipelined_rows<Op, R, ACCESS>(p, launch, dynamic_shared());
  } else {
    direct_rows<Op, R, ACCESS>(p, launch);
  }
}

// The launches of an op in a regime.
template <typename Op, typename R>
struct RowLauncher {
  const typename Op::Params& p;
  const Plan& plan;
  typename Op::Launch& launch;
  cudaStream_t stream;

  // Rows that are read again in each pass go one at a time.
  template <Access ACCESS>
  cudaError_t direct() const {
    using Own = std::conditional_t<Op::template Tile<R, ACCESS>::KEPT, R, typename Reread<R>::Regime>;
    using Tile = typename Op::template Tile<Own, ACCESS>;
    constexpr int kRows = Tile::KEPT ? Op::template kRows<Own> : 1;
    const int shared_bytes = plan.block_threads() * Op::template Epilogue<Own, Tile>::kSharedBytes;
    return launch_groups(row_kernel<Op, Own, ACCESS>, plan, plan.blocks_of(p.rows, kRows), shared_bytes, stream, p,
                         launch);
  }

  // By way of pipelines where clusters can have them. `is_aligned`: whether vectors divide all rows, and may be
  // accessed whole.
  cudaError_t run(bool is_aligned) const {
    if constexpr (R::kCluster > 1 && R::kVectors != kStreamed)
      if (is_aligned)
        if (const cudaError_t error = pipelined<Access::pipelined>({}); error != cudaErrorNotSupported) return error;
    return is_aligned ? direct<Access::vectors>() : direct<Access::elementwise>();
  }

  // cudaErrorNotSupported: the device has no pipelines, or no room for them and `besides` bytes. `workspace`: for the
  // count of tickets, where clusters draw them.
  template <Access ACCESS>
  cudaError_t pipelined([[maybe_unused]] const Workspace& workspace, int besides = 0) const {
    using Tile = typename Op::template Tile<R, ACCESS>;
    constexpr bool kHoldsOne = Op::template kHoldsTwo<R> || Op::template PipelinedEpilogue<R, Tile>::kReduces;
    constexpr int held = Op::kHolds ? 0 : kHoldsOne && !Op::template kDynamic<ACCESS> ? 1 : 2;
    const int bytes = Op::template Load<Tile>::shared_bytes(launch, plan, p, held, besides);
    if (bytes == 0) return cudaErrorNotSupported;
    int64_t clusters = std::min<int64_t>(p.rows, current_device().groups_at_once(plan.blocks_per_row));
    if constexpr (Op::template kDynamic<ACCESS>) {
      const cudaError_t error = launch.schedule_dynamically(clusters, p.rows, workspace, stream);
      if (error != cudaSuccess) return error;
    } else {
      launch.set_grid_stride(clusters, p.rows);
    }
    return launch_groups(row_kernel<Op, R, ACCESS>, plan, clusters, bytes, stream, p, launch);
  }
};

}  // namespace jaxnorm::cuda
