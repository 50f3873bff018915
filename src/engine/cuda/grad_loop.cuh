// The gradient's loop over rows, for rows that a thread group has at hand: directly from memory or by way of pipelines.
// It leaves dx, and partial sums of the gradients of weights.
#pragma once

#include "engine/cuda/grad_row.cuh"
#include "engine/cuda/partials.h"

namespace jaxnorm::cuda {

// Whether dx of a row is deferred until the sums of the next are under way, so that nothing stands still while a thread
// group of several warps or blocks exchanges those of the row. Shared memory has room for so many rows of half types
// only; and within a block two sums a row, and rows that vectors do not divide, have so much to compute that it is
// slower.
template <typename Op, typename R, bool VECTORS>
constexpr bool kDeferDx = sizeof(typename Op::X) + sizeof(typename Op::DY) == 4 && Op::kExtra != Extra::pipelined &&
                          (R::kCluster > 1 || (R::kThreads <= 0 && Op::Scalars::kSums == 1 && VECTORS));

// What the loop is compiled for.
template <typename Op, typename R, Access ACCESS>
struct GradTypes {
  // Three rows are not held in registers.
  static constexpr bool kRereads = Op::kTransforms && Op::kExtra != Extra::pipelined;
  using Tile = std::conditional_t<kRereads, RereadTiling<typename Op::X, R, ACCESS>, Tiling<typename Op::X, R, ACCESS>>;
  using Group = ThreadGroup<R::kThreads, Sums<Op::Scalars::kSums>, R::kCluster, R::kMost, R::kManyWarps>;
  using DScale = std::conditional_t<(Op::kWeights > 0), ColumnSums<Tile>, NoColumnSums>;
  using DBias = std::conditional_t<(Op::kWeights > 1), ColumnSums<Tile>, NoColumnSums>;
  static constexpr bool kDeferDx = Tile::PIPELINED && cuda::kDeferDx<Op, R, (Tile::N > 1)>;
};

// Which rows a block has, and where they are.
template <typename Op, typename Types>
struct GradRows {
  using X = typename Op::X;
  using DY = typename Op::DY;
  using Tile = typename Types::Tile;
  using Group = typename Types::Group;

  const GradCall<typename Op::State>& p;
  const GradRowsLaunch& launch;
  const Group& group;
  const X* const x = static_cast<const X*>(p.x.data);
  const X* const extra = static_cast<const X*>(p.extra.data);
  // Of weight rows with neighbours block i has rows of weight row i % count, which are counted for themselves.
  // Pipelines are for those that lie together: what it takes to find each would cost all calls 5 to 10 % of their time.
  const bool has_neighbours = launch.weight_rows.has_neighbours, is_run = Tile::PIPELINED && has_neighbours;
  const int block_rows = launch.rows_per_block;
  const int64_t part = has_neighbours ? launch.weight_rows.count.quotient(group.index) : group.index;

  // The index-th row of the block's weight row.
  __device__ int64_t own_row(int64_t index) const {
    return launch.weight_rows.row_of(launch.weight_rows.count.remainder(group.index), index);
  }

  // Where these begin, if they lie together.
  __device__ int64_t run() const { return is_run ? own_row(0) : 0; }

  __device__ int64_t row_of(int64_t index) const { return has_neighbours && !is_run ? own_row(index) : index; }

  // The first row of the block's first group of rows, counted so.
  __device__ int64_t first() const { return run() + part * block_rows; }

  // Where thread groups share a warp, half types take 7 % more time from the last row on, for reasons unknown.
  __device__ Rows rows() const {
    if (is_run) return {first(), launch.step, run() + launch.end, block_rows};
    return Group::kGroupsOfWarp > 1 ? launch.forwards(first(), block_rows) : launch.backwards(first(), block_rows);
  }

  __device__ int64_t weight_row() const { return launch.weight_rows.of_row(row_of(first() + group.place)); }

  __device__ auto dy(int64_t at) const { return row_at<DY>(p.dy, at); }

  __device__ auto make_pipeline(char* shared, const Rows& rows) const {
    if constexpr (Op::kExtra == Extra::pipelined) {
      return PipelineOf<Tile, Group, X, DY, X>(group, launch.pipeline, shared, rows, x, dy(0), extra);
    } else {
      return PipelineOf<Tile, Group, X, DY>(group, launch.pipeline, shared, rows, x, dy(0));
    }
  }

  // Where a row's columns of this block are in arrays of pipelines.
  __device__ int64_t in_pipeline(int64_t row) const { return row * p.cols + group.begin; }
  __device__ auto dy_in_pipeline(int64_t row) const { return dy(row * launch.pipeline.stride[1] + group.begin); }

  template <typename Pipeline, typename Operands>
  __device__ void read(int64_t row, const Pipeline& pipeline, Operands& operands) const {
    if constexpr (Tile::PIPELINED) {
      operands.x.read(group, pipeline.template newest<0>(x + in_pipeline(row)));
      operands.dy.read(group, pipeline.template newest<1>(dy_in_pipeline(row)));
      if constexpr (Op::kTransforms) operands.extra.read(group, pipeline.template newest<2>(extra + in_pipeline(row)));
    } else {
      operands.x.read(group, x + row * p.cols);
      operands.dy.read(group, dy(row * (p.cols + p.dy_pad)));
      if constexpr (Op::kTransforms) operands.extra.read(group, extra + row * p.cols);
    }
  }

  // What is added to dx of a row.
  template <typename Pipeline>
  __device__ auto added(int64_t row, const Pipeline& pipeline) const {
    if constexpr (Op::kTransforms || Op::kExtra == Extra::absent) {
      return NothingAdded{};
    } else if constexpr (Op::kExtra == Extra::in_memory) {
      return MemoryAdded<X, Tile>{extra ? extra + row * p.cols : nullptr};
    } else {
      PipelineAdded<X, Tile> added;
      added.row.read(group, pipeline.template oldest<2>(extra + in_pipeline(row)));
      return added;
    }
  }
};

// Leaves the partial sums of a block's rows.
template <typename Types, typename Source>
__device__ __forceinline__ void write_partials(const Source& source, const typename Types::DScale& dscale,
                                               const typename Types::DBias& dbias, const Partials& partials,
                                               char* shared) {
  const GradRowsLaunch& launch = source.launch;
  const auto& count = launch.weight_rows.count;
  // The weight rows of the block's thread groups follow each other, from this one on where a partial row has all.
  const int first =
      count.value > 1 && launch.own.sums == count.value ? static_cast<int>(count.remainder(source.first())) : 0;
  const int64_t at = source.group.index * launch.own.sums * source.p.cols;
  const auto write = [&](const auto& sums, float* to) {
    if (to)
      sums.write(source.group, source.block_rows, launch.own.sums, first, reinterpret_cast<float*>(shared), to + at);
  };
  if constexpr (!std::is_same_v<typename Types::DScale, NoColumnSums>) write(dscale, partials.dscale);
  if constexpr (!std::is_same_v<typename Types::DBias, NoColumnSums>) write(dbias, partials.dbias);
}

template <typename Op, typename R, Access ACCESS>
__device__ __forceinline__ void grad_rows(const GradCall<typename Op::State>& p, const Partials& partials,
                                          const GradRowsLaunch& launch, char* shared) {
  using Types = GradTypes<Op, R, ACCESS>;
  using Tile = typename Types::Tile;
  using Group = typename Types::Group;
  constexpr bool kDeferDx = Types::kDeferDx;
  constexpr int kGroups = Group::kGroupsOfWarp;
  Group group(launch.threads_per_row, p.cols, launch.span, launch.reciprocal_cols);
  const GradRows<Op, Types> source{p, launch, group};
  const Rows rows = source.rows();
  auto pipeline = source.make_pipeline(shared, rows);
  ScaleOf<Op, Tile> scale(group, from(p.scale, source.weight_row() * p.cols));
  // Thread groups of a warp leave a row together, so one without a row of the last group joins the others.
  const int in_warp = group.place % kGroups;
  const int64_t start = rows.start(group.place - in_warp) + in_warp;
  // Of the row to come, of the one whose sums are under way, and of the one before, whose dx may be deferred.
  typename Op::Scalars fetched{}, current{}, deferred;
  fetch_scalars<Op>(p, source.row_of(start), fetched);
  pipeline.acquire_rest();
  scale.arrive(p.scale_offset, 1.0f);
  Operands<Op, Tile> operands(Op(p.state));
  typename Types::DScale dscale;
  typename Types::DBias dbias;

  for (int64_t next = start; rows.has(next - in_warp) || (kDeferDx && rows.has(next - rows.step)); next += rows.step) {
    if (kGroups > 1 && next >= rows.end) {
      pipeline.wait();
      pipeline.release();
      break;
    }
    deferred = current;
    if (!kDeferDx || rows.has(next)) {
      current = fetched;
      pipeline.wait();
      source.read(source.row_of(next), pipeline, operands);
      fetch_scalars<Op>(p, source.row_of(next + rows.step), fetched);
      group.publish(warp_sums<Op, Tile>(group, current, operands, scale, dscale, dbias));
      pipeline.synced();
    }
    if (kDeferDx && next == start) continue;
    const int64_t row = source.row_of(kDeferDx ? next - rows.step : next);
    const auto sums = group.collect();
    if (Op(p.state).has_result(p.dx)) {
      if constexpr (kDeferDx) {
        operands.x.read(group, pipeline.template oldest<0>(source.x + source.in_pipeline(row)));
        operands.dy.read(group, pipeline.template oldest<1>(source.dy_in_pipeline(row)));
      }
      const auto place = [&](void* array) { return static_cast<typename Op::X*>(array) + row * p.cols; };
      finish_row<Op, Tile>(group, kDeferDx ? deferred : current, sums, operands, scale,
                           Op(p.state).template result<Tile>(p.dx, source.added(row, pipeline), place));
    }
    pipeline.release();
  }
  // A thread group without a row of the last group meets as often as the others: compute-sanitizer reports races
  // otherwise.
  if (R::kThreads == kWholeWarps && rows.is_short(group.place)) group.meet();
  if constexpr (Op::kWeights > 0) {
    __syncthreads();  // the pipeline is empty, and its memory may serve for sums
    write_partials<Types>(source, dscale, dbias, partials, shared);
  }
}

template <typename Op, typename R, Access ACCESS>
__global__ void __launch_bounds__(R::kMost)
    grad_kernel(const __grid_constant__ GradCall<typename Op::State> p, const __grid_constant__ Partials partials,
                const __grid_constant__ GradRowsLaunch launch) {
  constexpr bool kPipelined = ACCESS == Access::pipelined || ACCESS == Access::pipelined_scalar;
  if constexpr (kHasClusters || (R::kCluster == 1 && !kPipelined))
    grad_rows<Op, R, ACCESS>(p, partials, launch, dynamic_shared());
}

}  // namespace jaxnorm::cuda
