// The forward of both norms: one pass over memory, the row in registers between its statistics and its epilogue.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/norms.h"
#include "cuda/row.cuh"

namespace jaxnorm::cuda {

struct Statistics {
  float mean, rstd;
};

// mean(x^2), or the exact mean and variance: the deviations are summed about each warp's own mean, and the warps'
// moments merged (Chan, Golub, LeVeque 1983), so that E[x^2] - mean^2 is never formed and one barrier is enough.
template <Kind KIND, typename W, typename X, typename T>
__device__ Statistics statistics(const Row<X, W>& x, T& team, int64_t cols, float epsilon) {
  // The sum over this warp's part of the row, vector by vector: f(sum, value, present) adds one element. Absent
  // elements, past the row's end, read as zero.
  const auto sum_of = [&](auto f) {
    Accumulator<W> sum = 0;
    for_each_vector<W>(team, cols, [&](int slot, int64_t first, int valid) {
      float values[W::N], part = 0;
      x.get(slot, first, valid, values);
#pragma unroll
      for (int i = 0; i < W::N; ++i) part = f(part, values[i], i < valid);
      sum += part;
    });
    return static_cast<float>(team.warp_sum(sum));
  };

  if constexpr (KIND == Kind::rms) {
    team.publish({sum_of([](float sum, float value, bool) { return fmaf(value, value, sum); })});
    const float squares = team.sum([](const float (&entry)[1]) { return entry[0]; });
    return {0.0f, __frsqrt_rn(squares / cols + epsilon)};
  } else {
    const float count = team.warp_cols(cols, W::N);
    const float sum = sum_of([](float sum, float value, bool) { return sum + value; });
    const float warp_mean = count > 0 ? sum / count : 0.0f;
    const float squares = sum_of([&](float sum, float value, bool present) {
      const float deviation = present ? value - warp_mean : 0.0f;
      return fmaf(deviation, deviation, sum);
    });
    team.publish({count, warp_mean, squares});
    const float mean = team.sum([](const float (&entry)[3]) { return entry[0] * entry[1]; }) / cols;
    const float m2 =
        team.sum([&](const float (&entry)[3]) { return entry[2] + entry[0] * (entry[1] - mean) * (entry[1] - mean); });
    return {mean, __frsqrt_rn(m2 / cols + epsilon)};
  }
}

// Where a block stages what.
struct ForwardStage {
  char *x, *scale, *bias;
};

// The bytes of a weight's vector, of as many elements as one of X.
template <typename X>
__host__ __device__ int weight_bytes(const Input& weight) {
  return weight.data ? kVector<X> * (weight.dtype == Dtype::f32 ? 4 : 2) : 0;
}

// y = x_hat * (scale + scale_offset) + bias of one vector, in place of x.
template <int N, typename AnyWeight>
__device__ void normalise(const Forward& p, Statistics s, const AnyWeight& scale, const AnyWeight& bias, int slot,
                          int64_t first, int valid, float (&y)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = (y[i] - s.mean) * s.rstd;
  if (!p.multiply_before_cast) {
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = round_to(p.y.dtype, y[i]);
  }
  float weight[N];
  if (p.scale.data) {
    scale.get(slot, first, valid, weight);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] *= weight[i] + p.scale_offset;
  }
  if (p.bias.data) {
    bias.get(slot, first, valid, weight);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] += weight[i];
  }
}

template <typename F>
cudaError_t with_forward_regime(const Plan& plan, F f) {
  const bool cluster = plan.blocks_per_row > 1;
  if (plan.vectors == kStreamed)
    return cluster ? f(Regime<kWholeBlock, kStreamed, kMaxCluster>{}) : f(Regime<kWholeBlock, kStreamed, 1>{});
  if (cluster) return f(Regime<kWholeBlock, kForwardVectors, kMaxCluster>{});
  if (plan.rows_share_block()) return with_shared_block(plan, f);
  return plan.vectors == 4 ? f(Regime<kWholeBlock, 4, 1>{}) : f(Regime<kWholeBlock, kForwardVectors, 1>{});
}

template <typename X>
__device__ bool is_plain(const Forward& p) {
  const auto plain = [](Dtype dtype) { return dtype == kDtype<X>; };
  return plain(p.y.dtype) && (!p.scale.data || plain(p.scale.dtype)) && (!p.bias.data || plain(p.bias.dtype));
}

// PLAIN: scale, bias and y are of type X too, as the compiler then knows.
template <Kind KIND, typename X, typename R, Access ACCESS, bool PLAIN>
__device__ __forceinline__ void forward_rows(const Forward& p, const ForwardStage& stage) {
  using W = Walk<X, R::kVectors, ACCESS>;
  Team<R::kThreads, KIND == Kind::rms ? 1 : 3, R::kCluster> team;
  Row<X, W> x(p.x.data, p.cols, stage.x);
  using WeightOf = std::conditional_t<PLAIN, PlainWeight<X, W>, Weight<W>>;
  WeightOf scale(p.scale, p.cols, stage.scale), bias(p.bias, p.cols, stage.bias);

  if (team.first_row < p.rows) x.prefetch(team, team.first_row);
  scale.prefetch(team);
  bias.prefetch(team);
  for (int64_t row = team.first_row; row < p.rows; row += team.row_stride) {
    __pipeline_commit();
    __pipeline_wait_prior(0);
    x.read(team, row);
    if (row + team.row_stride < p.rows) x.prefetch(team, row + team.row_stride);
    const Statistics s = statistics<KIND, W>(x, team, p.cols, p.epsilon);
    if (p.rstd && team.rank == 0) {
      p.rstd[row] = s.rstd;
      if (KIND == Kind::layer) p.mean[row] = s.mean;
    }
    for_each_vector<W>(team, p.cols, [&](int slot, int64_t first, int valid) {
      float y[W::N];
      x.get(slot, first, valid, y);
      normalise(p, s, scale, bias, slot, first, valid, y);
      if constexpr (PLAIN) {
        store(static_cast<X*>(p.y.data) + row * p.cols + first, pack<X>(y), valid, W::ALIGNED);
      } else {
        store_floats(p.y, row * p.cols + first, valid, W::ALIGNED, y);
      }
    });
  }
}

template <Kind KIND, typename X, typename R>
__global__ void __launch_bounds__(R::kBlockThreads, R::kCluster > 1 ? 1 : 1024 / R::kBlockThreads)
    forward_kernel(const __grid_constant__ Forward p, Access access) {
  constexpr bool kStages = R::kCluster > 1 && R::kVectors != kStreamed;
  if constexpr (R::kCluster > 1 && !kHasClusters) return;
  extern __shared__ __align__(16) char shared[];
  if (access == Access::elements) {
    forward_rows<KIND, X, R, Access::elements, false>(p, {});
  } else if (kStages && access == Access::staged) {
    char* scale = shared + staged_bytes(blockDim.x, R::kVectors, 16);
    char* bias = scale + staged_bytes(blockDim.x, R::kVectors, weight_bytes<X>(p.scale));
    if constexpr (kStages) forward_rows<KIND, X, R, Access::staged, false>(p, {shared, scale, bias});
  } else if (is_plain<X>(p)) {
    forward_rows<KIND, X, R, Access::vectors, true>(p, {});
  } else {
    forward_rows<KIND, X, R, Access::vectors, false>(p, {});
  }
}

template <Kind KIND, typename X>
cudaError_t launch_forward(const Forward& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  constexpr int own_bytes = 7 << 10;  // more than any kernel here declares
  const Plan plan = make_plan(Op::forward, kDtype<X>, p.cols, current_device().max_cluster);
  const bool aligned = p.cols % N == 0 && aligned_for<N>(p.x.dtype, p.x.data) && aligned_for<N>(p.y.dtype, p.y.data) &&
                       aligned_for<N>(p.scale.dtype, p.scale.data) && aligned_for<N>(p.bias.dtype, p.bias.data);
  const int bytes =
      staged_bytes(plan.block_threads(), plan.vectors, 16 + weight_bytes<X>(p.scale) + weight_bytes<X>(p.bias));
  const Reach reach(plan, aligned, plan.blocks_per_row > 1 ? bytes : 0, own_bytes);
  return with_forward_regime(plan, [&](auto regime) {
    return launch_teams(forward_kernel<KIND, X, decltype(regime)>, plan, std::min(p.rows, reach.teams), reach, stream,
                        p, reach.access);
  });
}

template <typename X>
cudaError_t forward_of(const Forward& p, cudaStream_t stream) {
  return p.kind == Kind::rms ? launch_forward<Kind::rms, X>(p, stream) : launch_forward<Kind::layer, X>(p, stream);
}

}  // namespace jaxnorm::cuda
