// The backward where a team holds its row in registers: dx, and the sums over the team's rows on the way.
#pragma once

#include "cuda/forward.cuh"
#include "cuda/partials.h"

namespace jaxnorm::cuda {

// The running sums of a team's rows, one float for each element that a thread owns.
template <typename W>
struct ColumnSums {
  float value[W::VECTORS][W::N] = {};

  // One row of partial sums from the teams of a block, or of a cluster: a team that has the block for itself owns its
  // columns; teams that share the block add theirs in turn.
  template <typename Team>
  __device__ void write(const Team& team, float* to, int64_t cols) const {
    if constexpr (Team::kSpansWarps) {
      for_each_vector<W>(team, cols, [&](int slot, int64_t first, int valid) {
        store(to + first, pack<float>(value[slot]), valid, W::ALIGNED);
      });
    } else {
      __shared__ float sums[W::N * W::VECTORS * kWarpSize];
      for (int turn = 0; turn < static_cast<int>(blockDim.x) / team.size; ++turn) {
        if (static_cast<int>(threadIdx.x) / team.size == turn) {
          for_each_vector<W>(team, cols, [&](int slot, int64_t first, int valid) {
#pragma unroll
            for (int i = 0; i < W::N; ++i)
              if (i < valid) sums[first + i] = (turn > 0 ? sums[first + i] : 0.0f) + value[slot][i];
          });
        }
        __syncthreads();
      }
      for (int col = threadIdx.x; col < cols; col += blockDim.x) to[col] = sums[col];
      __syncthreads();  // `sums` may be used again
    }
  }
};

struct NoSums {};

// g = dy * (scale + scale_offset).
template <int N, typename AnyWeight>
__device__ void scale_cotangent(const AnyWeight& scale, float offset, int slot, int64_t first, int valid,
                                float (&dy)[N]) {
  float factor[N];
  scale.get(slot, first, valid, factor);
#pragma unroll
  for (int i = 0; i < N; ++i) dy[i] *= factor[i] + offset;
}

// Where a block stages what.
struct BackwardStage {
  char *x, *dy, *scale;
};

// dx, and the partial sums of dscale and, for layer norm, of dbias, each where it is asked for. The sums stay with the
// team over all of its rows, so the next row is fetched while this one is worked on.
template <Kind KIND, typename X, typename DY, typename R, Access ACCESS>
__device__ __forceinline__ void backward_rows(const Backward& p, const Partials& partials, const BackwardStage& stage) {
  using W = Walk<X, R::kVectors, ACCESS>;
  constexpr bool kLayer = KIND == Kind::layer;
  Team<R::kThreads, kLayer ? 2 : 1, R::kCluster> team;
  Row<X, W> x(p.x.data, p.cols, stage.x);
  Row<DY, W> dy(p.dy.data, p.cols, stage.dy);
  Weight<W> scale(p.scale, p.cols, stage.scale);
  ColumnSums<W> dscale;
  std::conditional_t<kLayer, ColumnSums<W>, NoSums> dbias;

  float mean = 0, rstd = 0;  // of the next row, between prefetch and read
  const auto prefetch = [&](int64_t row) {
    if (row >= p.rows) return;
    x.prefetch(team, row);
    dy.prefetch(team, row);
    __pipeline_commit();
    rstd = p.rstd[row];
    if constexpr (kLayer) mean = p.mean[row];
  };

  scale.prefetch(team);
  prefetch(team.first_row);
  for (int64_t row = team.first_row; row < p.rows; row += team.row_stride) {
    const Statistics s{mean, rstd};
    __pipeline_wait_prior(0);
    x.read(team, row);
    dy.read(team, row);
    prefetch(row + team.row_stride);

    float g_sum = 0, gx_sum = 0;
    for_each_vector<W>(team, p.cols, [&](int slot, int64_t first, int valid) {
      float x_hat[W::N], g[W::N], g_part = 0, gx_part = 0;
      x.get(slot, first, valid, x_hat);
      dy.get(slot, first, valid, g);
#pragma unroll
      for (int i = 0; i < W::N; ++i) {
        x_hat[i] = (x_hat[i] - s.mean) * s.rstd;
        dscale.value[slot][i] = fmaf(g[i], x_hat[i], dscale.value[slot][i]);
        if constexpr (kLayer) dbias.value[slot][i] += g[i];
      }
      if (p.scale.data) scale_cotangent(scale, p.scale_offset, slot, first, valid, g);
#pragma unroll
      for (int i = 0; i < W::N; ++i) {
        g_part += g[i];
        gx_part = fmaf(g[i], x_hat[i], gx_part);
      }
      g_sum += g_part;
      gx_sum += gx_part;
    });

    float g_mean = 0, gx_mean;
    if constexpr (kLayer) {
      team.publish({team.warp_sum(gx_sum), team.warp_sum(g_sum)});
      gx_mean = team.sum([](const float (&entry)[2]) { return entry[0]; }) / p.cols;
      g_mean = team.sum([](const float (&entry)[2]) { return entry[1]; }) / p.cols;
    } else {
      team.publish({team.warp_sum(gx_sum)});
      gx_mean = team.sum([](const float (&entry)[1]) { return entry[0]; }) / p.cols;
    }

    if (!p.dx.data) continue;
    for_each_vector<W>(team, p.cols, [&](int slot, int64_t first, int valid) {
      float dx[W::N], g[W::N];
      x.get(slot, first, valid, dx);
      dy.get(slot, first, valid, g);
      if (p.scale.data) scale_cotangent(scale, p.scale_offset, slot, first, valid, g);
#pragma unroll
      for (int i = 0; i < W::N; ++i) dx[i] = s.rstd * fmaf(-(dx[i] - s.mean) * s.rstd, gx_mean, g[i] - g_mean);
      store(static_cast<X*>(p.dx.data) + row * p.cols + first, pack<X>(dx), valid, W::ALIGNED);
    });
  }

  if (partials.dscale) dscale.write(team, partials.dscale + team.index * p.cols, p.cols);
  if constexpr (kLayer)
    if (partials.dbias) dbias.write(team, partials.dbias + team.index * p.cols, p.cols);
}

template <Kind KIND, typename X, typename DY, typename R>
__global__ void __launch_bounds__(R::kBlockThreads)
    backward_kernel(const __grid_constant__ Backward p, const __grid_constant__ Partials partials, Access access) {
  constexpr bool kStages = R::kThreads == kWholeBlock;
  if constexpr (R::kCluster > 1 && !kHasClusters) return;
  extern __shared__ __align__(16) char shared[];
  if (access == Access::elements) {
    backward_rows<KIND, X, DY, R, Access::elements>(p, partials, {});
  } else if (kStages && access == Access::staged) {
    char* dy = shared + staged_bytes(blockDim.x, R::kVectors, 16);
    char* scale = dy + staged_bytes(blockDim.x, R::kVectors, kVector<X> * sizeof(DY));
    if constexpr (kStages) backward_rows<KIND, X, DY, R, Access::staged>(p, partials, {shared, dy, scale});
  } else {
    backward_rows<KIND, X, DY, R, Access::vectors>(p, partials, {});
  }
}

template <typename X, typename F>
cudaError_t with_backward_regime(const Plan& plan, F f) {
  constexpr int vectors = backward_vectors(kVector<X>);
  if (plan.rows_share_block()) return with_shared_block(plan, f);
  return plan.blocks_per_row > 1 ? f(Regime<kWholeBlock, vectors, kBackwardCluster>{})
                                 : f(Regime<kWholeBlock, vectors, 1>{});
}

template <Kind KIND, typename X, typename DY>
cudaError_t launch_rows(const Backward& p, const Plan& plan, Partials partials, bool aligned, cudaStream_t stream) {
  const int vector_bytes = 16 + kVector<X> * static_cast<int>(sizeof(DY)) + weight_bytes<X>(p.scale);
  const int bytes = staged_bytes(plan.block_threads(), plan.vectors, vector_bytes);
  constexpr int own_bytes = 5 << 9;  // more than a kernel that stages declares
  const Reach reach(plan, aligned, plan.rows_share_block() ? 0 : bytes, own_bytes);
  const bool sums = partials.dscale || partials.dbias;
  const int64_t teams = sums ? partials.rows * plan.rows_per_block : reach.teams;
  return with_backward_regime<X>(plan, [&](auto regime) {
    return launch_teams(backward_kernel<KIND, X, DY, decltype(regime)>, plan, std::min(p.rows, teams), reach, stream, p,
                        partials, reach.access);
  });
}

}  // namespace jaxnorm::cuda
