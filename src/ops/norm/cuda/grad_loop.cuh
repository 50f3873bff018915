// The gradient's loop over rows, for rows that a thread group has at hand: directly from memory or by way of pipelines.
// It leaves dx, and partial sums of the gradients of weights. Then the regimes that it is compiled for, and its launch.
#pragma once

#include "engine/cuda/launch.cuh"
#include "engine/cuda/partials.h"
#include "ops/norm/cuda/grad_row.cuh"
#include "ops/norm/cuda/plan.h"

namespace jaxnorm::cuda {

// What gradients have to know of a launch besides.
struct GradOwn {
  int sums = 1;  // as of RowSchedule
};
using GradRowsLaunch = RowsLaunchOf<GradOwn>;

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

// From a plan to the types that its kernels are compiled for.
template <typename... R>
struct RegimeList {};

template <typename... A, typename... B>
constexpr RegimeList<A..., B...> operator+(RegimeList<A...>, RegimeList<B...>) {
  return {};
}

// Whether the kernels of a regime serve a plan.
template <typename R>
constexpr bool serves(const Plan& plan) {
  if (plan.vectors != R::kVectors || plan.block_threads() > R::kMost || plan.blocks_per_row > R::kCluster) return false;
  if (R::kThreads > 0) return plan.threads_per_row == R::kThreads;
  if (R::kThreads == kWholeWarps) return plan.threads_per_row > kWarp;
  return plan.rows_per_block == 1 && (plan.blocks_per_row > 1) == (R::kCluster > 1);
}

// Calls f with the first regime of a list that serves a plan. A test sees to it that there is one for every plan.
template <typename F, typename R, typename... More>
cudaError_t with_regime(RegimeList<R, More...>, const Plan& plan, F f) {
  if (serves<R>(plan)) return f(R{});
  if constexpr (sizeof...(More) > 0) return with_regime(RegimeList<More...>{}, plan, f);
  return cudaErrorInvalidConfiguration;
}

// Those of the list without clusters and without more elements a thread than kElements.
template <typename X, typename... R>
constexpr auto small_batch_regimes(RegimeList<R...>) {
  return (std::conditional_t < R::kCluster == 1 && R::kVectors * kVector<X> <= kElements, RegimeList<R>,
          RegimeList < >> {} + ... + RegimeList<>{});
}

// The tables. A block of as many threads as a regime may have leaves its registers: 128 a thread of 512, 96 of 640, 80
// of 768.
template <typename X>
constexpr auto grad_regimes() {
  constexpr int most = kElements / kVector<X>;
  using Shared = RegimeList<Regime<16, most, 1>, Regime<kWarp, most, 1>, Regime<kWholeWarps, most, 1>,
                            Regime<kWholeBlock, most, kMaxCluster>>;
  if constexpr (sizeof(X) == 4) {
    return RegimeList<Regime<8, 1, 1>, Regime<8, 2, 1>, Regime<8, most, 1>>{} + Shared{};
  } else {
    return RegimeList<Regime<8, 1, 1>, Regime<8, most, 1>>{} + Shared{} +
           RegimeList<Regime<kWholeWarps, most, 1, kWideThreads>, Regime<kWholeWarps, 1, 1, kThinThreads>>{};
  }
}

// Of ops that have much to compute beside three arrays: blocks of half types have more threads of one vector each.
template <typename X>
constexpr auto busy_grad_regimes() {
  constexpr int most = kElements / kVector<X>;
  constexpr RegimeList<Regime<kWholeBlock, 2 * most, 1>> longest;
  if constexpr (sizeof(X) == 4) {
    return grad_regimes<X>() + longest;
  } else {
    return RegimeList<Regime<8, 1, 1, kThinThreads>, Regime<16, 1, 1, kThinThreads>, Regime<kWarp, 1, 1, kThinThreads>,
                      Regime<kWholeWarps, most, 1>, Regime<kWholeWarps, 1, 1>, Regime<kWholeWarps, 1, 1, kWideThreads>,
                      Regime<kWholeWarps, 1, 1, kThinThreads>, Regime<kWholeBlock, most, kMaxCluster>>{} +
           longest;
  }
}

// From a call to the kernel of its loop. Rows are reached in the first of these ways that there is a kernel for and
// that the arrays and the device's shared memory allow. Ways names the functor of each, void where no kernel goes that
// way:
//
//   PipelinedExtra, Pipelined   aligned arrays, with an extra operand that comes by way of pipelines and without one
//   PipelinedScalar             rows that vectors do not divide; of one block's only if there is Pipelined
//   Vectors, Scalar             the same without pipelines, where one block has a row; there is always Vectors
//   Elementwise                 any array, in vectors that are read element by element; there always is one, for rows
//                               of ElementwiseRegime<R>
//
// X and DY of Ways are the types of x and dy.
template <typename Ways, typename State>
class GradLaunch {
  using X = typename Ways::X;

 public:
  // `aligned`: whether all arrays are aligned to vectors, which divide their rows.
  GradLaunch(const GradCall<State>& p, const Plan& plan, const RowMap& weight_rows, const GradRoom& room, bool aligned,
             cudaStream_t stream)
      : p_(p),
        plan_(plan),
        room_(room),
        aligned_(aligned),
        divided_(p.cols % kVector<X> == 0 && p.cols % kVector<typename Ways::DY> == 0),
        stream_(stream),
        launch_(plan, p.cols, kVector<X>, weight_rows) {
    launch_.set_grid_stride(room.schedule.stride, room.schedule.end);
    launch_.own.sums = room.schedule.sums;
  }

  template <typename R>
  cudaError_t run(R) {
    // Blocks that are no clusters have no registers for pipelines beside more elements a thread, and larger blocks are
    // of rows that vectors divide.
    constexpr bool kPipelines = R::kCluster > 1 || R::kVectors * kVector<X> <= kElements;
    constexpr bool kScalars = R::kMost <= kMaxThreads;
    constexpr bool kScalarPipelines = kScalars && (R::kCluster > 1 || !std::is_void_v<typename Ways::Pipelined>);
    cudaError_t error = cudaErrorNotSupported;
    if constexpr (kPipelines) {
      if (aligned_ && p_.extra) {
        error = try_pipelines<typename Ways::PipelinedExtra, R, Access::pipelined>();
      } else if (aligned_) {
        error = try_pipelines<typename Ways::Pipelined, R, Access::pipelined>();
      } else if constexpr (kScalarPipelines) {
        if (!divided_) error = try_pipelines<typename Ways::PipelinedScalar, R, Access::pipelined_scalar>();
      }
    }
    if (error != cudaErrorNotSupported) return error;
    if constexpr (R::kCluster == 1) {
      if (aligned_) return start<typename Ways::Vectors, R, Access::vectors>();
      if constexpr (kScalars && !std::is_void_v<typename Ways::Scalar>)
        if (!divided_) return start<typename Ways::Scalar, R, Access::scalar>();
    }
    return start<typename Ways::Elementwise, typename Ways::template ElementwiseRegime<R>, Access::elementwise>();
  }

 private:
  // cudaErrorNotSupported: there is no such kernel, or no room for its pipelines.
  template <typename Op, typename R, Access ACCESS>
  cudaError_t try_pipelines() {
    if constexpr (std::is_void_v<Op>) {
      return cudaErrorNotSupported;
    } else {
      if (!has_whole_runs()) return cudaErrorNotSupported;
      const PipelineArray x{sizeof(X), p_.cols}, dy{sizeof(typename Op::DY), p_.cols + p_.dy_pad};
      const int held = kDeferDx<Op, R, ACCESS == Access::pipelined> ? 2 : 1;
      const int bytes = Op::kExtra == Extra::pipelined ? launch_.with_pipelines(plan_, p_.cols, {x, dy, x}, held)
                                                       : launch_.with_pipelines(plan_, p_.cols, {x, dy}, held);
      return bytes > 0 ? start<Op, R, ACCESS>(bytes) : cudaErrorNotSupported;
    }
  }

  template <typename Op, typename R, Access ACCESS>
  cudaError_t start(int pipeline_bytes = 0) {
    // Thread groups that share a block add up their sums over rows where pipelines were.
    const int sums = plan_.rows_per_block > 1 ? plan_.block_threads() * kElements * int{sizeof(float)} : 0;
    return launch_groups(grad_kernel<Op, R, ACCESS>, plan_, room_.schedule.blocks, std::max(pipeline_bytes, sums),
                         stream_, p_, room_.partials, launch_);
  }

  // Whether neighbouring rows of one weight row, if there are such, are all that it has, and enough for every thread
  // group.
  bool has_whole_runs() const {
    const RowMapLaunch& rows = launch_.weight_rows;
    return !rows.has_neighbours || (p_.rows == rows.count.value * rows.inner.value && launch_.step <= launch_.end);
  }

  const GradCall<State>& p_;
  const Plan& plan_;
  const GradRoom& room_;
  const bool aligned_, divided_;
  const cudaStream_t stream_;
  GradRowsLaunch launch_;
};

// Launches the loop in the regime of a plan.
template <typename Ways, typename Regimes, typename State>
cudaError_t launch_grad_rows(Regimes regimes, const GradCall<State>& p, const Plan& plan, const RowMap& weight_rows,
                             const GradRoom& room, bool aligned, cudaStream_t stream) {
  GradLaunch<Ways, State> launch(p, plan, weight_rows, room, aligned, stream);
  return with_regime(regimes, plan, [&](auto regime) { return launch.run(regime); });
}

}  // namespace jaxnorm::cuda
