// The forward of both norms: one pass over memory, the row in registers between its statistics and its epilogue.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/norms.h"
#include "cuda/row.cuh"

namespace jaxnorm::cuda {

struct Statistics {
  float mean, rstd;
};

// mean(x^2), or the exact mean and variance: the deviations are summed about each warp's own mean, and the warps' moments
// merged (Chan, Golub, LeVeque 1983), so that E[x^2] - mean^2 is never formed and one barrier is enough.
template <Kind KIND, int N, int VECTORS, typename Row, typename Team>
__device__ Statistics statistics(const Row& x, Team& team, int64_t cols, float epsilon) {
  // f(value, present) summed over this warp's part of the row. Absent elements, past the row's end, read as zero.
  const auto sum_of = [&](auto f) {
    Accumulator<VECTORS> sum = 0;
    for_each_vector<N, VECTORS>(team, cols, [&](int slot, int64_t first, int valid) {
      float values[N], part = 0;
      x.get(slot, first, valid, values);
#pragma unroll
      for (int i = 0; i < N; ++i) part += f(values[i], i < valid);
      sum += part;
    });
    return static_cast<float>(team.warp_sum(sum));
  };

  if constexpr (KIND == Kind::rms) {
    team.publish({sum_of([](float value, bool) { return value * value; })});
    const float squares = team.sum([](const float(&entry)[1]) { return entry[0]; });
    return {0.0f, __frsqrt_rn(squares / cols + epsilon)};
  } else {
    const float count = sum_of([](float, bool present) { return present ? 1.0f : 0.0f; });
    const float sum = sum_of([](float value, bool) { return value; });
    const float warp_mean = count > 0 ? sum / count : 0.0f;
    const float squares = sum_of(
        [&](float value, bool present) { return present ? (value - warp_mean) * (value - warp_mean) : 0.0f; });
    team.publish({count, warp_mean, squares});
    const float mean = team.sum([](const float(&entry)[3]) { return entry[0] * entry[1]; }) / cols;
    const float m2 = team.sum([&](const float(&entry)[3]) {
      return entry[2] + entry[0] * (entry[1] - mean) * (entry[1] - mean);
    });
    return {mean, __frsqrt_rn(m2 / cols + epsilon)};
  }
}

template <Kind KIND, typename X, typename R>
__global__ void __launch_bounds__(R::kBlockThreads) forward_kernel(Forward p, bool aligned) {
  constexpr int N = kVector<X>;
  if constexpr (R::kCluster && !kHasClusters) return;
  Team<R::kThreads, KIND == Kind::rms ? 1 : 3, R::kCluster> team;

  for_each_row(team, p.rows, [&](int64_t row) {
    const Row<X, N, R::kVectors> x(team, p.x.data, row, p.cols, aligned);
    const Statistics row_statistics = statistics<KIND, N, R::kVectors>(x, team, p.cols, p.epsilon);
    const float mean = row_statistics.mean, rstd = row_statistics.rstd;
    if (p.rstd && team.rank == 0) {
      p.rstd[row] = rstd;
      if (KIND == Kind::layer) p.mean[row] = mean;
    }

    for_each_vector<N, R::kVectors>(team, p.cols, [&](int slot, int64_t first, int valid) {
      float y[N], weight[N];
      x.get(slot, first, valid, y);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        y[i] = (y[i] - mean) * rstd;
        if (!p.multiply_before_cast) y[i] = round_to(p.y.dtype, y[i]);
      }
      if (p.scale.data) {
        load_floats(p.scale, first, valid, aligned, weight);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] *= weight[i] + p.scale_offset;
      }
      if (p.bias.data) {
        load_floats(p.bias, first, valid, aligned, weight);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] += weight[i];
      }
      store_floats(p.y, row * p.cols + first, valid, aligned, y);
    });
  });
}

template <Kind KIND, typename X>
cudaError_t launch_forward(const Forward& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const Plan plan = make_plan(Op::forward, kDtype<X>, p.cols, max_cluster());
  const bool aligned = p.cols % N == 0 && aligned_for<N>(p.x.dtype, p.x.data) && aligned_for<N>(p.y.dtype, p.y.data) &&
                       aligned_for<N>(p.scale.dtype, p.scale.data) && aligned_for<N>(p.bias.dtype, p.bias.data);
  return with_regime<8>(plan, [&](auto regime) {
    return launch(forward_kernel<KIND, X, decltype(regime)>, plan, p.rows, stream, p, aligned);
  });
}

template <typename X>
cudaError_t forward_of(const Forward& p, cudaStream_t stream) {
  return p.kind == Kind::rms ? launch_forward<Kind::rms, X>(p, stream) : launch_forward<Kind::layer, X>(p, stream);
}

}  // namespace jaxnorm::cuda
