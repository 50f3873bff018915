// What an op is to the loops over rows (row_loop.cuh): a struct derived from RowOp, with
//
//   Params                          what its kernels know of a call: rows, cols and what its functors look at
//   Load<Tile>                      how rows reach a thread group (ops/load.cuh)
//   Stats                           what has to be known of a whole row (ops/stats.cuh)
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

}  // namespace jaxnorm::cuda
