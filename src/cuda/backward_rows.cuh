// The backward where a team has its row at hand: dx, and the sums over the team's rows on the way.
#pragma once

#include "cuda/backward_gated_row.cuh"
#include "cuda/partials.h"

namespace jaxnorm::cuda {

// Whether dx of a row comes after the sums of the next, so that nothing stands still while a team, of several warps or
// several blocks, exchanges those of the row. Shared memory has room for so many rows of half types only; and within a
// block LayerNorm and rows that vectors do not divide (not VECTORS), which have more to compute, are slower so.
template <Kind KIND, Third THIRD, typename X, typename DY, typename R, bool VECTORS>
constexpr bool kBehind = sizeof(X) + sizeof(DY) == 4 && THIRD == Third::none &&
                         (R::kCluster > 1 || (R::kThreads <= 0 && KIND == Kind::rms && VECTORS));

// dx, and the partial sums of dscale and, if BIAS, of dbias, each where it is asked for. A team has those of
// its rows, which are of one head, in registers. A third array comes by way of the ring, too, if there is
// one.
template <Kind KIND, bool BIAS, Third THIRD, typename X, typename DY, typename R, Access ACCESS>
__device__ __forceinline__ void backward_rows(const Backward& p, const Partials& partials, const RowsLaunch& launch,
                                              char* shared) {
  // Three rows are not held in registers.
  constexpr bool kGated = kIsGate<THIRD>;
  using W = std::conditional_t<kGated && ACCESS != Access::ring, WalkAgain<X, R, ACCESS>, Walk<X, R, ACCESS>>;
  using Threads = Team<R::kThreads, RowSums<KIND>, R::kCluster, R::kMost, R::kManyWarps>;
  Threads team(launch.threads_per_row, p.cols, launch.span, launch.reciprocal_cols);
  const HeadsLaunch& heads = launch.heads;
  // Of heads with neighbours block i has rows of head i % count, which are counted for themselves. They come without a
  // ring: what it takes to find each would cost the others 5 to 10 % of their time.
  const bool has_neighbours = !W::RING && heads.has_neighbours;
  const auto row_of = [&](int64_t index) {
    return has_neighbours ? heads.row_of(heads.count.remainder(team.index), index) : index;
  };
  const int group = launch.rows_per_block;
  const int64_t part = has_neighbours ? heads.count.quotient(team.index) : team.index;
  // Where teams share a warp, half types take 7 % more time from the last row on, for reasons unknown.
  constexpr int kTeams = Threads::kTeamsOfWarp;
  const Rows rows = kTeams > 1 ? launch.forwards(part * group, group) : launch.backwards(part * group, group);
  const X* const x_data = static_cast<const X*>(p.x.data);
  const auto dy_row = [&](int64_t at) { return row_at<DY>(p.dy, at); };
  const X* const third_data = static_cast<const X*>(kGated ? p.gate.data.data : p.dsum.data);
  auto ring = [&] {
    if constexpr (THIRD != Third::none) {
      return RingOf<W, Threads, X, DY, X>(team, launch.ring, shared, rows, x_data, dy_row(0), third_data);
    } else {
      return RingOf<W, Threads, X, DY>(team, launch.ring, shared, rows, x_data, dy_row(0));
    }
  }();
  const int64_t head = heads.of_row(row_of(part * group + team.place));
  FloatWeight<W> scale(team, from(p.scale, head * p.cols));
  // Teams of a warp leave a row together, so one without a row of the last group joins the others.
  const int of_warp = team.place % kTeams;
  const int64_t start = rows.start(team.place - of_warp) + of_warp;
  RowStatistics fetched, newest{}, oldest;
  fetched.template fetch<KIND>(p, row_of(start));
  ring.fill_up();
  scale.arrive(p.scale_offset, 1.0f);
  constexpr bool kBehind = W::RING && cuda::kBehind<KIND, THIRD, X, DY, R, (W::N > 1)>;
  std::conditional_t<kGated, GatedOperands<X, W, THIRD>, Operands<X, DY, W>> operands;
  if constexpr (kGated) operands.how = p.gate;
  ColumnSums<W> dscale;
  std::conditional_t<BIAS, ColumnSums<W>, NoSums> dbias;

  for (int64_t next = start; rows.has(next - of_warp) || (kBehind && rows.has(next - rows.step)); next += rows.step) {
    if (kTeams > 1 && next >= rows.end) {
      ring.take();
      ring.leave();
      break;
    }
    oldest = newest;
    if (!kBehind || rows.has(next)) {
      newest = fetched;
      ring.take();
      const int64_t row = row_of(next);
      if constexpr (W::RING) {
        const int64_t at = row * p.cols + team.begin;
        operands.x.read(team, ring.template newest<0>(x_data + at));
        operands.dy.read(team, ring.template newest<1>(dy_row(row * launch.ring.stride[1] + team.begin)));
        if constexpr (kGated) operands.gate.read(team, ring.template newest<2>(third_data + at));
      } else {
        operands.x.read(team, x_data + row * p.cols);
        operands.dy.read(team, dy_row(row * (p.cols + p.dy_pad)));
        if constexpr (kGated) operands.gate.read(team, third_data + row * p.cols);
      }
      fetched.template fetch<KIND>(p, row_of(next + rows.step));

      team.publish(warp_sums<KIND, W>(team, newest, operands, scale, dscale, dbias));
      ring.met();
    }
    if (kBehind && next == start) continue;
    const int64_t row = row_of(kBehind ? next - rows.step : next);
    const RowSums<KIND> sums = team.collect();
    if (p.dx.data || (kGated && p.dgate.data)) {
      if constexpr (kBehind) {
        operands.x.read(team, ring.template oldest<0>(x_data + row * p.cols + team.begin));
        operands.dy.read(team, ring.template oldest<1>(dy_row(row * launch.ring.stride[1] + team.begin)));
      }
      const auto store = [&](const auto& result) {
        store_dx<KIND, W>(team, kBehind ? oldest : newest, sums, operands, scale, result);
      };
      const auto add_and_store = [&](const auto& added) {
        store(DxResult<W, X, std::decay_t<decltype(added)>>{added, static_cast<X*>(p.dx.data) + row * p.cols});
      };
      if constexpr (kGated) {
        const auto row_of_result = [&](const Output& to) {
          return to.data ? static_cast<X*>(to.data) + row * p.cols : nullptr;
        };
        store(GatedResult<W, X>(row_of_result(p.dx), row_of_result(p.dgate)));
      } else if constexpr (THIRD == Third::dsum) {
        RingAdded<X, W> added;
        added.row.read(team, ring.template oldest<2>(third_data + row * p.cols + team.begin));
        add_and_store(added);
      } else if constexpr (W::RING && W::N > 1) {
        add_and_store(NothingAdded{});
      } else {
        add_and_store(MemoryAdded<X, W>{third_data ? third_data + row * p.cols : nullptr});
      }
    }
    ring.leave();
  }
  // A team without a row of the last group meets as often as the others: compute-sanitizer reports races otherwise.
  if (R::kThreads == kWholeWarps && start - team.place < rows.start(0)) team.meet();
  __syncthreads();  // the ring is empty, and its memory may serve for sums
  float* const space = reinterpret_cast<float*>(shared);
  // The heads of the block's teams follow each other, from this one on where the partial row has all of them.
  const int first_head = heads.count.value > 1 && launch.sums == heads.count.value
                             ? static_cast<int>(heads.count.remainder(part * group))
                             : 0;
  const int64_t sums_at = team.index * launch.sums * p.cols;
  const auto write = [&](const auto& sums, float* to) {
    if (to) sums.write(team, rows.group, launch.sums, first_head, space, to + sums_at);
  };
  write(dscale, partials.dscale);
  if constexpr (BIAS) write(dbias, partials.dbias);
}

template <Kind KIND, bool BIAS, Third THIRD, typename X, typename DY, typename R, Access ACCESS>
__global__ void __launch_bounds__(R::kMost)
    backward_kernel(const __grid_constant__ Backward p, const __grid_constant__ Partials partials,
                    const __grid_constant__ RowsLaunch launch) {
  constexpr bool kRing = ACCESS == Access::ring || ACCESS == Access::ring_elements;
  if constexpr (kHasClusters || (R::kCluster == 1 && !kRing)) {
    backward_rows<KIND, BIAS, THIRD, X, DY, R, ACCESS>(p, partials, launch, dynamic_shared());
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

// With dsum as the third array only of aligned arrays, and cudaErrorNotSupported where there are no rings or no room
// for them; otherwise dsum, if there is one, is read when it is added.
template <Kind KIND, bool BIAS, Third THIRD, typename X, typename DY>
cudaError_t launch_rows(const Backward& p, const Plan& plan, const Shares& shares, const Partials& partials,
                        bool aligned, cudaStream_t stream) {
  // What is rare has no rings, and goes the slow way if vectors do not divide its rows, for kernels take time to
  // compile: dbias of RMS norm, half types whose dy is f32.
  constexpr bool kUsual = KIND == Kind::layer || !BIAS, kOneType = std::is_same_v<X, DY> && kUsual;
  constexpr bool kRings = (std::is_same_v<X, DY> || sizeof(X) == 4) && kUsual;
  const bool divided = p.cols % kVector<X> == 0 && p.cols % kVector<DY> == 0;
  RowsLaunch launch(plan, p.cols, kVector<X>, p.heads);
  launch.take_turns(shares.step, shares.end);
  launch.sums = shares.sums;
  const bool rings = kRings && !launch.heads.has_neighbours;
  const RingArray x_array{sizeof(X), p.cols}, dy_array{sizeof(DY), p.cols + p.dy_pad};
  const int sums = plan.rows_per_block > 1 ? plan.block_threads() * kElements * int{sizeof(float)} : 0;
  return with_backward_regime<KIND, X>(plan, [&](auto regime) {
    using R = decltype(regime);
    const bool behind = divided ? kBehind<KIND, THIRD, X, DY, R, true> : kBehind<KIND, THIRD, X, DY, R, false>;
    const int held = behind ? 2 : 1;
    int ring = 0;
    if constexpr (THIRD == Third::dsum) {
      if (!rings) return cudaErrorNotSupported;
      ring = launch.with_rings(plan, p.cols, {x_array, dy_array, x_array}, held);
    } else if (rings && ((aligned && !p.dsum) || (kOneType && !divided))) {
      ring = launch.with_rings(plan, p.cols, {x_array, dy_array}, held);
    }
    const auto launch_kernel = [&](auto kernel) {
      return launch_teams(kernel, plan, shares.blocks, std::max(ring, sums), stream, p, partials, launch);
    };
    const auto launch_as = [&](auto access) {
      constexpr bool kBias = BIAS || !kOneType;  // what is rare has one kernel for both
      return launch_kernel(backward_kernel<KIND, kBias, THIRD, X, DY, R, decltype(access)::value>);
    };
    if constexpr (kRings)
      if (ring > 0 && divided) return launch_as(AccessAs<Access::ring>{});
    if constexpr (THIRD == Third::dsum) {
      return cudaErrorNotSupported;
    } else {
      constexpr bool kAnyLength = R::kMost <= kMaxThreads;  // larger blocks are of rows that vectors divide
      if constexpr (kOneType && kAnyLength)
        if (ring > 0) return launch_as(AccessAs<Access::ring_elements>{});
      // Without rings, or without room for them. A cluster goes the slow way.
      if constexpr (R::kCluster == 1) {
        if (aligned) return launch_as(AccessAs<Access::vectors>{});
        if constexpr (kOneType && kAnyLength)
          if (!divided) return launch_as(AccessAs<Access::elements>{});
      }
      // What is rarest, one for all types of dy and, where vectors past a row's end add zeros, all numbers of vectors.
      constexpr int most = kElements / kVector<X>;
      constexpr int kVectors = R::kThreads > 0 && R::kVectors < most ? most : R::kVectors;
      using Any = Regime<R::kThreads, kVectors, R::kCluster, R::kMost>;
      return launch_kernel(backward_kernel<KIND, true, THIRD, X, AnyElement, Any, Access::unaligned>);
    }
  });
}

}  // namespace jaxnorm::cuda
