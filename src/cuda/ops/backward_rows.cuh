// The backward where a thread group has its row at hand: dx, and the sums over the thread group's rows on the way.
#pragma once

#include "cuda/engine/partials.h"
#include "cuda/ops/backward_gated_row.cuh"

namespace jaxnorm::cuda {

// Whether dx of a row comes after the sums of the next, so that nothing stands still while a thread group, of several
// warps or several blocks, exchanges those of the row. Shared memory has room for so many rows of half types only; and
// within a block LayerNorm and rows that vectors do not divide (not VECTORS), which have more to compute, are slower
// so.
template <Kind KIND, Extra EXTRA, typename X, typename DY, typename R, bool VECTORS>
constexpr bool kDeferDx = sizeof(X) + sizeof(DY) == 4 && EXTRA == Extra::none &&
                          (R::kCluster > 1 || (R::kThreads <= 0 && KIND == Kind::rms && VECTORS));

// dx, and the partial sums of dscale and, if BIAS, of dbias, each where it is asked for. A thread group has those of
// its rows, which are of one head, in registers. A third array comes by way of the pipeline, too, if there is
// one.
template <Kind KIND, bool BIAS, Extra EXTRA, typename X, typename DY, typename R, Access ACCESS>
__device__ __forceinline__ void backward_rows(const Backward& p, const Partials& partials, const RowsLaunch& launch,
                                              char* shared) {
  // Three rows are not held in registers.
  constexpr bool kGated = kIsGate<EXTRA>;
  using Tile =
      std::conditional_t<kGated && ACCESS != Access::pipelined, RereadTiling<X, R, ACCESS>, Tiling<X, R, ACCESS>>;
  using Threads = ThreadGroup<R::kThreads, RowSums<KIND>, R::kCluster, R::kMost, R::kManyWarps>;
  Threads group(launch.threads_per_row, p.cols, launch.span, launch.reciprocal_cols);
  const RowMapLaunch& weight_rows = launch.weight_rows;
  // Of heads with neighbours block i has rows of head i % count, which are counted for themselves. They come without a
  // pipeline: what it takes to find each would cost the others 5 to 10 % of their time.
  const bool has_neighbours = !Tile::PIPELINED && weight_rows.has_neighbours;
  const auto row_of = [&](int64_t index) {
    return has_neighbours ? weight_rows.row_of(weight_rows.count.remainder(group.index), index) : index;
  };
  const int block_rows = launch.rows_per_block;
  const int64_t part = has_neighbours ? weight_rows.count.quotient(group.index) : group.index;
  // Where thread groups share a warp, half types take 7 % more time from the last row on, for reasons unknown.
  constexpr int kGroups = Threads::kGroupsOfWarp;
  const Rows rows =
      kGroups > 1 ? launch.forwards(part * block_rows, block_rows) : launch.backwards(part * block_rows, block_rows);
  const X* const x_data = static_cast<const X*>(p.x.data);
  const auto dy_row = [&](int64_t at) { return row_at<DY>(p.dy, at); };
  const X* const extra_data = static_cast<const X*>(kGated ? p.gate.data.data : p.dsum.data);
  auto pipeline = [&] {
    if constexpr (EXTRA != Extra::none) {
      return PipelineOf<Tile, Threads, X, DY, X>(group, launch.pipeline, shared, rows, x_data, dy_row(0), extra_data);
    } else {
      return PipelineOf<Tile, Threads, X, DY>(group, launch.pipeline, shared, rows, x_data, dy_row(0));
    }
  }();
  const int64_t head = weight_rows.of_row(row_of(part * block_rows + group.place));
  FloatWeight<Tile> scale(group, from(p.scale, head * p.cols));
  // Teams of a warp leave a row together, so one without a row of the last group joins the others.
  const int of_warp = group.place % kGroups;
  const int64_t start = rows.start(group.place - of_warp) + of_warp;
  RowStatistics fetched, newest{}, oldest;
  fetched.template fetch<KIND>(p, row_of(start));
  pipeline.acquire_rest();
  scale.arrive(p.scale_offset, 1.0f);
  constexpr bool kDeferDx = Tile::PIPELINED && cuda::kDeferDx<KIND, EXTRA, X, DY, R, (Tile::N > 1)>;
  std::conditional_t<kGated, GatedOperands<X, Tile, EXTRA>, Operands<X, DY, Tile>> operands;
  if constexpr (kGated) operands.how = p.gate;
  ColumnSums<Tile> dscale;
  std::conditional_t<BIAS, ColumnSums<Tile>, NoSums> dbias;

  for (int64_t next = start; rows.has(next - of_warp) || (kDeferDx && rows.has(next - rows.step)); next += rows.step) {
    if (kGroups > 1 && next >= rows.end) {
      pipeline.wait();
      pipeline.release();
      break;
    }
    oldest = newest;
    if (!kDeferDx || rows.has(next)) {
      newest = fetched;
      pipeline.wait();
      const int64_t row = row_of(next);
      if constexpr (Tile::PIPELINED) {
        const int64_t at = row * p.cols + group.begin;
        operands.x.read(group, pipeline.template newest<0>(x_data + at));
        operands.dy.read(group, pipeline.template newest<1>(dy_row(row * launch.pipeline.stride[1] + group.begin)));
        if constexpr (kGated) operands.gate.read(group, pipeline.template newest<2>(extra_data + at));
      } else {
        operands.x.read(group, x_data + row * p.cols);
        operands.dy.read(group, dy_row(row * (p.cols + p.dy_pad)));
        if constexpr (kGated) operands.gate.read(group, extra_data + row * p.cols);
      }
      fetched.template fetch<KIND>(p, row_of(next + rows.step));

      group.publish(warp_sums<KIND, Tile>(group, newest, operands, scale, dscale, dbias));
      pipeline.synced();
    }
    if (kDeferDx && next == start) continue;
    const int64_t row = row_of(kDeferDx ? next - rows.step : next);
    const RowSums<KIND> sums = group.collect();
    if (p.dx.data || (kGated && p.dgate.data)) {
      if constexpr (kDeferDx) {
        operands.x.read(group, pipeline.template oldest<0>(x_data + row * p.cols + group.begin));
        operands.dy.read(group, pipeline.template oldest<1>(dy_row(row * launch.pipeline.stride[1] + group.begin)));
      }
      const auto store = [&](const auto& result) {
        store_dx<KIND, Tile>(group, kDeferDx ? oldest : newest, sums, operands, scale, result);
      };
      const auto add_and_store = [&](const auto& added) {
        store(DxResult<Tile, X, std::decay_t<decltype(added)>>{added, static_cast<X*>(p.dx.data) + row * p.cols});
      };
      if constexpr (kGated) {
        const auto row_of_result = [&](const Output& to) {
          return to.data ? static_cast<X*>(to.data) + row * p.cols : nullptr;
        };
        store(GatedResult<Tile, X>(row_of_result(p.dx), row_of_result(p.dgate)));
      } else if constexpr (EXTRA == Extra::dsum) {
        PipelineAdded<X, Tile> added;
        added.row.read(group, pipeline.template oldest<2>(extra_data + row * p.cols + group.begin));
        add_and_store(added);
      } else if constexpr (Tile::PIPELINED && Tile::N > 1) {
        add_and_store(NothingAdded{});
      } else {
        add_and_store(MemoryAdded<X, Tile>{extra_data ? extra_data + row * p.cols : nullptr});
      }
    }
    pipeline.release();
  }
  // A thread group without a row of the last group meets as often as the others: compute-sanitizer reports races
  // otherwise.
  if (R::kThreads == kWholeWarps && start - group.place < rows.start(0)) group.meet();
  __syncthreads();  // the pipeline is empty, and its memory may serve for sums
  float* const space = reinterpret_cast<float*>(shared);
  // The heads of the block's thread groups follow each other, from this one on where the partial row has all of them.
  const int first_head = weight_rows.count.value > 1 && launch.sums == weight_rows.count.value
                             ? static_cast<int>(weight_rows.count.remainder(part * block_rows))
                             : 0;
  const int64_t sums_at = group.index * launch.sums * p.cols;
  const auto write = [&](const auto& sums, float* to) {
    if (to) sums.write(group, rows.block_rows, launch.sums, first_head, space, to + sums_at);
  };
  write(dscale, partials.dscale);
  if constexpr (BIAS) write(dbias, partials.dbias);
}

template <Kind KIND, bool BIAS, Extra EXTRA, typename X, typename DY, typename R, Access ACCESS>
__global__ void __launch_bounds__(R::kMost)
    backward_kernel(const __grid_constant__ Backward p, const __grid_constant__ Partials partials,
                    const __grid_constant__ RowsLaunch launch) {
  constexpr bool kPipelined = ACCESS == Access::pipelined || ACCESS == Access::pipelined_scalar;
  if constexpr (kHasClusters || (R::kCluster == 1 && !kPipelined)) {
    backward_rows<KIND, BIAS, EXTRA, X, DY, R, ACCESS>(p, partials, launch, dynamic_shared());
  }
}

template <Kind KIND, typename X, typename F>
cudaError_t with_backward_regime(const Plan& plan, F f) {
  constexpr int most = kElements / kVector<X>;
  if constexpr (KIND == Kind::rms && sizeof(X) == 2)
    if (plan.vectors > most) return f(Regime<kWholeBlock, 2 * most, kMaxCluster>{});
  if (plan.blocks_per_row > 1) return f(Regime<kWholeBlock, most, kMaxCluster>{});
  if constexpr (sizeof(X) == 2) {
    if (plan.threads_per_row > kWarp && plan.vectors == 1) return f(Regime<kWholeWarps, 1, 1, kThinThreads>{});
    if (plan.block_threads() > kMaxThreads) return f(Regime<kWholeWarps, most, 1, kWideThreads>{});
  }
  if (plan.threads_per_row > kWarp) return f(Regime<kWholeWarps, most, 1>{});
  if (plan.threads_per_row == kWarp) return f(Regime<kWarp, most, 1>{});
  if (plan.threads_per_row == 16) return f(Regime<16, most, 1>{});
  if (plan.vectors == 1) return f(Regime<8, 1, 1>{});
  return plan.vectors == 2 ? f(Regime<8, 2, 1>{}) : f(Regime<8, most, 1>{});
}

// With dsum as the third array only of aligned arrays, and cudaErrorNotSupported where there are no pipelines or no
// room for them; otherwise dsum, if there is one, is read when it is added.
template <Kind KIND, bool BIAS, Extra EXTRA, typename X, typename DY>
cudaError_t launch_rows(const Backward& p, const Plan& plan, const RowSchedule& schedule, const Partials& partials,
                        bool aligned, cudaStream_t stream) {
  // What is rare has no pipelines, and goes the slow way if vectors do not divide its rows, for kernels take time to
  // compile: dbias of RMS norm, half types whose dy is f32.
  constexpr bool kUsual = KIND == Kind::layer || !BIAS, kOneType = std::is_same_v<X, DY> && kUsual;
  constexpr bool kPipelines = (std::is_same_v<X, DY> || sizeof(X) == 4) && kUsual;
  const bool divided = p.cols % kVector<X> == 0 && p.cols % kVector<DY> == 0;
  RowsLaunch launch(plan, p.cols, kVector<X>, p.weight_rows);
  launch.take_turns(schedule.step, schedule.end);
  launch.sums = schedule.sums;
  const bool pipelines = kPipelines && !launch.weight_rows.has_neighbours;
  const PipelineArray x_array{sizeof(X), p.cols}, dy_array{sizeof(DY), p.cols + p.dy_pad};
  const int sums = plan.rows_per_block > 1 ? plan.block_threads() * kElements * int{sizeof(float)} : 0;
  return with_backward_regime<KIND, X>(plan, [&](auto regime) {
    using R = decltype(regime);
    const bool defers_dx = divided ? kDeferDx<KIND, EXTRA, X, DY, R, true> : kDeferDx<KIND, EXTRA, X, DY, R, false>;
    const int held = defers_dx ? 2 : 1;
    int pipeline = 0;
    if constexpr (EXTRA == Extra::dsum) {
      if (!pipelines) return cudaErrorNotSupported;
      pipeline = launch.with_pipelines(plan, p.cols, {x_array, dy_array, x_array}, held);
    } else if (pipelines && ((aligned && !p.dsum) || (kOneType && !divided))) {
      pipeline = launch.with_pipelines(plan, p.cols, {x_array, dy_array}, held);
    }
    const auto launch_kernel = [&](auto kernel) {
      return launch_groups(kernel, plan, schedule.blocks, std::max(pipeline, sums), stream, p, partials, launch);
    };
    const auto launch_as = [&](auto access) {
      constexpr bool kBias = BIAS || !kOneType;  // what is rare has one kernel for both
      return launch_kernel(backward_kernel<KIND, kBias, EXTRA, X, DY, R, decltype(access)::value>);
    };
    if constexpr (kPipelines)
      if (pipeline > 0 && divided) return launch_as(AccessAs<Access::pipelined>{});
    if constexpr (EXTRA == Extra::dsum) {
      return cudaErrorNotSupported;
    } else {
      constexpr bool kAnyLength = R::kMost <= kMaxThreads;  // larger blocks are of rows that vectors divide
      if constexpr (kOneType && kAnyLength)
        if (pipeline > 0) return launch_as(AccessAs<Access::pipelined_scalar>{});
      // Without pipelines, or without room for them. A cluster goes the slow way.
      if constexpr (R::kCluster == 1) {
        if (aligned) return launch_as(AccessAs<Access::vectors>{});
        if constexpr (kOneType && kAnyLength)
          if (!divided) return launch_as(AccessAs<Access::scalar>{});
      }
      // What is rarest, one for all types of dy and, where vectors past a row's end add zeros, all numbers of vectors.
      constexpr int most = kElements / kVector<X>;
      constexpr int kVectors = R::kThreads > 0 && R::kVectors < most ? most : R::kVectors;
      using Any = Regime<R::kThreads, kVectors, R::kCluster, R::kMost>;
      return launch_kernel(backward_kernel<KIND, true, EXTRA, X, AnyElement, Any, Access::elementwise>);
    }
  });
}

}  // namespace jaxnorm::cuda
