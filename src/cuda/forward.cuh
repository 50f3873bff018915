// The forward of both norms: one pass over memory, the row in registers or shared memory between its statistics and its
// epilogue.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/norms.h"
#include "cuda/row.cuh"

namespace jaxnorm::cuda {

struct Statistics {
  float mean, rstd;
};

template <Kind KIND>
using Part = std::conditional_t<KIND == Kind::rms, Sums<1>, Moments>;

// This warp's part of the statistics: the sum of squares, or the moments about the warp's own mean, so that
// E[x^2] - mean^2 is never formed. `count`: how many columns the warp has.
template <Kind KIND, typename W, typename X, typename T>
__device__ Part<KIND> warp_part(const Row<X, W>& x, const T& team, float count, float reciprocal_count) {
  // The sum over this warp's part of the row, vector by vector: f(sum, value, present) adds one element. Absent
  // elements, past the row's end, read as zero.
  const auto sum_of = [&](auto f) {
    Accumulator<W> sum = 0;
    for_each_vector<W>(team, [&](int slot, int64_t first, int valid) {
      float values[W::N], part = 0;
      x.get(slot, first, valid, values);
#pragma unroll
      for (int i = 0; i < W::N; ++i) part = f(part, values[i], i < valid);
      sum += part;
    });
    return static_cast<float>(team.warp_sum(sum));
  };

  if constexpr (KIND == Kind::rms) {
    return {{sum_of([](float sum, float value, bool) { return fmaf(value, value, sum); })}};
  } else {
    const float mean = sum_of([](float sum, float value, bool) { return sum + value; }) * reciprocal_count;
    const float squares = sum_of([&](float sum, float value, bool present) {
      const float deviation = present ? value - mean : 0.0f;
      return fmaf(deviation, deviation, sum);
    });
    return {{count, mean, squares, 0}};
  }
}

template <Kind KIND>
__device__ Statistics statistics(const Part<KIND>& row, float reciprocal_cols, float epsilon) {
  if constexpr (KIND == Kind::rms) {
    return {0.0f, __frsqrt_rn(fmaf(row.value[0], reciprocal_cols, epsilon))};
  } else {
    return {row.value[1], __frsqrt_rn(fmaf(row.value[2], reciprocal_cols, epsilon))};
  }
}

// What the compiler knows of a call, so that all loads of weights go out together, without a branch between them: y is
// of x's type, the weights that there are of type T, a scale is among them, BIAS tells whether there is a bias, and
// ROUND whether x_hat is rounded before the multiplication. If T is void, all of this is seen at run time.
template <typename T, bool BIAS, bool ROUND>
struct Call {
  using Weight = T;
  static constexpr bool kKnown = !std::is_void_v<T>, kBias = BIAS, kRound = ROUND;
};

using AnyCall = Call<void, true, true>;

// y = x_hat * (scale + scale_offset) + bias of one vector, in place of x.
template <Kind KIND, typename X, typename C, int N, typename AnyWeight>
__device__ void normalise(const Forward& p, Statistics s, const AnyWeight& scale, const AnyWeight& bias, int slot,
                          int64_t first, int valid, float (&y)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = (KIND == Kind::layer ? y[i] - s.mean : y[i]) * s.rstd;
  if constexpr (C::kKnown) {
    if constexpr (C::kRound) unpack(pack<X>(y), y);
  } else if (!p.multiply_before_cast) {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = round_to(p.y.dtype, y[i]);
  }
  float weight[N];
  scale.get(slot, first, valid, weight);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] *= weight[i];
  if constexpr (C::kBias) {
    bias.get(slot, first, valid, weight);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] += weight[i];
  }
}

template <Kind KIND, typename X, typename R, Access ACCESS, typename C>
__device__ __forceinline__ void forward_rows(const Forward& p, const RowsLaunch& launch, char* shared) {
  using W = Walk<X, R::kVectors, ACCESS>;
  using Threads = Team<R::kThreads, Part<KIND>, R::kCluster>;
  using AnyWeight = Weight<typename C::Weight, W>;
  Threads team(launch.threads_per_row, p.cols, launch.span);
  const Rows rows{p.rows, p.cols, launch.rows_per_block, team.count};
  const X* const x_data = static_cast<const X*>(p.x.data);
  RingOf<W, X, X, Threads> ring(team, launch.ring, shared, rows);
  ring.start(team, rows, team.index, x_data, static_cast<const X*>(nullptr));
  const AnyWeight scale(team, p.scale, p.scale_offset, 1.0f), bias(team, p.bias, 0.0f, -0.0f);
  const float count = team.warp_cols(W::N), reciprocal_count = count > 0 ? 1.0f / count : 0.0f;
  Row<X, W> x;

  const int group = R::kThreads == kWholeBlock ? 1 : rows.group;
  const int64_t stride = team.count * group, first_row = team.index * group + team.place;
  constexpr bool kBehind = Threads::kSpansBlocks && W::RING;  // the epilogue, which waits for other blocks
  for (int64_t next = first_row; next < p.rows + (kBehind ? stride : 0); next += stride) {
    if (!kBehind || next < p.rows) {
      ring.take();
      if constexpr (W::RING) {
        x.read(team, ring.newest_a());
      } else {
        x.read(team, x_data + next * p.cols);
      }
      team.publish(warp_part<KIND, W>(x, team, count, reciprocal_count));
      ring.met();
    }
    if (kBehind && next == first_row) continue;
    const int64_t row = kBehind ? next - stride : next;
    const Statistics s = statistics<KIND>(team.collect(), team.reciprocal(), p.epsilon);
    if (p.rstd && team.rank + team.begin == 0) {
      p.rstd[row] = s.rstd;
      if (KIND == Kind::layer) p.mean[row] = s.mean;
    }
    if constexpr (W::RING) x.read(team, ring.oldest_a());
    for_each_vector<W>(team, [&](int slot, int64_t first, int valid) {
      float y[W::N];
      x.get(slot, first, valid, y);
      normalise<KIND, X, C>(p, s, scale, bias, slot, first, valid, y);
      if constexpr (C::kKnown) {
        store(static_cast<X*>(p.y.data) + row * p.cols + first, pack<X>(y), valid, W::ALIGNED);
      } else {
        store_floats(p.y, row * p.cols + first, valid, W::ALIGNED, y);
      }
    });
    ring.leave();
  }
}

template <Kind KIND, typename X, typename R>
__global__ void __launch_bounds__(kMaxThreads, R::kCluster > 1 ? 1 : 1024 / kMaxThreads)
    forward_kernel(const __grid_constant__ Forward p, const __grid_constant__ RowsLaunch launch) {
  constexpr bool kRing = R::kCluster > 1 && R::kVectors != kStreamed;
  constexpr Access kAligned = kRing ? Access::ring : Access::vectors;
  if constexpr (R::kCluster > 1 && !kHasClusters) return;
  extern __shared__ __align__(128) char shared[];
  if (launch.access != kAligned) {
    forward_rows<KIND, X, R, Access::elements, AnyCall>(p, launch, nullptr);
  } else if (R::kVectors == kStreamed || !p.scale.data || p.y.dtype != kDtype<X>) {
    forward_rows<KIND, X, R, kAligned, AnyCall>(p, launch, shared);
  } else if constexpr (R::kVectors != kStreamed) {
    // What models have: weights of x's type or f32, RMS norm without a bias, layer norm rounded once.
    const auto all_are = [&](Dtype dtype) { return p.scale.dtype == dtype && (!p.bias.data || p.bias.dtype == dtype); };
    const bool rounds = !p.multiply_before_cast && sizeof(X) < 4;
    constexpr bool kRms = KIND == Kind::rms;
    // RMS norm's second choice is whether it rounds, layer norm's whether it has a bias.
    const bool second = kRms ? rounds : p.bias.data != nullptr;
    if (kRms ? p.bias.data != nullptr : rounds) {
      forward_rows<KIND, X, R, kAligned, AnyCall>(p, launch, shared);
    } else if (kRing || all_are(kDtype<X>)) {
      second ? forward_rows<KIND, X, R, kAligned, Call<X, !kRms, kRms>>(p, launch, shared)
             : forward_rows<KIND, X, R, kAligned, Call<X, false, false>>(p, launch, shared);
    } else if (sizeof(X) < 4 && all_are(Dtype::f32)) {
      if constexpr (sizeof(X) < 4 && !kRing) {
        second ? forward_rows<KIND, X, R, kAligned, Call<float, !kRms, kRms>>(p, launch, shared)
               : forward_rows<KIND, X, R, kAligned, Call<float, false, false>>(p, launch, shared);
      }
    } else {
      forward_rows<KIND, X, R, kAligned, AnyCall>(p, launch, shared);
    }
  }
}

template <typename F>
cudaError_t with_forward_regime(const Plan& plan, F f) {
  const bool cluster = plan.blocks_per_row > 1;
  if (plan.vectors == kStreamed)
    return cluster ? f(Regime<kWholeBlock, kStreamed, kMaxCluster>{}) : f(Regime<kWholeBlock, kStreamed, 1>{});
  if (cluster)
    return plan.vectors == 4 ? f(Regime<kWholeBlock, 4, kMaxCluster>{}) : f(Regime<kWholeBlock, 8, kMaxCluster>{});
  if (plan.threads_per_row == 8) {
    if (plan.vectors == 1) return f(Regime<8, 1, 1>{});
    return plan.vectors == 2 ? f(Regime<8, 2, 1>{}) : f(Regime<8, 4, 1>{});
  }
  if (plan.rows_per_block > 1) return plan.vectors == 2 ? f(Regime<kWarp, 2, 1>{}) : f(Regime<kWarp, 4, 1>{});
  return plan.vectors == 4 ? f(Regime<kWholeBlock, 4, 1>{}) : f(Regime<kWholeBlock, 8, 1>{});
}

template <Kind KIND, typename X>
cudaError_t launch_forward(const Forward& p, const Plan& plan, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  constexpr int own_bytes = 2 << 10;  // more than any kernel here declares
  const bool aligned = p.cols % N == 0 && aligned_for<N>(p.x.dtype, p.x.data) && aligned_for<N>(p.y.dtype, p.y.data) &&
                       aligned_for<N>(p.scale.dtype, p.scale.data) && aligned_for<N>(p.bias.dtype, p.bias.data);
  RowsLaunch launch(plan, p.cols, N, aligned);
  int64_t teams = (p.rows + plan.rows_per_block - 1) / plan.rows_per_block;
  int shared = 0;
  if (aligned && plan.blocks_per_row > 1 && plan.vectors != kStreamed) {
    shared = launch.with_rings(plan, p.cols, sizeof(X), 0, own_bytes);
    teams = std::min<int64_t>(teams, current_device().teams_at_once(plan.blocks_per_row));
  }
  return with_forward_regime(plan, [&](auto regime) {
    return launch_teams(forward_kernel<KIND, X, decltype(regime)>, plan, teams, shared, stream, p, launch);
  });
}

template <typename X>
cudaError_t forward_of(const Forward& p, cudaStream_t stream) {
  const Plan plan = make_plan(Op::forward, p.kind, kDtype<X>, p.cols, current_device().max_cluster());
  return p.kind == Kind::rms ? launch_forward<Kind::rms, X>(p, plan, stream)
                             : launch_forward<Kind::layer, X>(p, plan, stream);
}

}  // namespace jaxnorm::cuda
