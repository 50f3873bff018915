// The backward where a team has its row at hand: dx, and the sums over the team's rows on the way.
#pragma once

#include "cuda/forward.cuh"
#include "cuda/partials.h"

namespace jaxnorm::cuda {

// The running sums of a team's rows, one float for each element that a thread owns.
template <typename W>
struct ColumnSums {
  float value[W::VECTORS][W::N];

  __device__ void clear() {
#pragma unroll
    for (int slot = 0; slot < W::VECTORS; ++slot)
#pragma unroll
      for (int i = 0; i < W::N; ++i) value[slot][i] = 0;
  }

  // Writes those of a block or a cluster: teams that share a block add up theirs in `space`, a float for each element
  // that the block's threads own.
  template <typename Team>
  __device__ void write(const Team& team, int teams, float* space, float* to) const {
    if (Team::kSpansBlocks || teams == 1) {
      for_each_vector<W>(team, [&](int slot, int64_t first, int valid) {
        store(to + first, pack<float>(value[slot]), valid, W::ALIGNED);
      });
      return;
    }
    float* const own = space + team.place * static_cast<int>(team.end);
    for_each_vector<W>(team, [&](int slot, int64_t first, int valid) {
#pragma unroll
      for (int i = 0; i < W::N; ++i)
        if (i < valid) own[first + i] = value[slot][i];
    });
    __syncthreads();
    for (int col = threadIdx.x; col < team.end; col += blockDim.x) {
      float sum = space[col];
      for (int i = 1; i < teams; ++i) sum += space[i * static_cast<int>(team.end) + col];
      to[col] = sum;
    }
    __syncthreads();  // `space` may be used again
  }
};

struct NoSums {
  __device__ void clear() {}
};

struct RowStatistics {
  float mean = 0, rstd = 0;

  template <Kind KIND>
  __device__ float x_hat(float x) const {
    return (KIND == Kind::layer ? x - mean : x) * rstd;
  }

  template <Kind KIND>
  __device__ void fetch(const Backward& p, int64_t row) {
    if (row >= p.rows) return;
    rstd = p.rstd[row];
    if (KIND == Kind::layer) mean = p.mean[row];
  }
};

// dx, and the partial sums of dscale and, if BIAS, of dbias, each where it is asked for. Partial sum i is over groups
// i, i + partials.rows, ... of rows; a team has its own in registers.
template <Kind KIND, bool BIAS, typename X, typename DY, typename R, Access ACCESS>
__device__ __forceinline__ void backward_rows(const Backward& p, const Partials& partials, const RowsLaunch& launch,
                                              char* shared) {
  using W = Walk<X, R::kVectors, ACCESS>;
  constexpr bool kLayer = KIND == Kind::layer;
  using Part = Sums<kLayer ? 2 : 1>;
  using Threads = Team<R::kThreads, Part, R::kCluster>;
  Threads team(launch.threads_per_row, p.cols, launch.span);
  const Rows rows{p.rows, p.cols, launch.rows_per_block, partials.rows};
  const X* const x_data = static_cast<const X*>(p.x.data);
  const DY* const dy_data = static_cast<const DY*>(p.dy.data);
  RingOf<W, X, DY, Threads> ring(team, launch.ring, shared, rows);
  const int64_t stride = rows.stride * rows.group;
  // dx may wait for other blocks while the next row is begun, if shared memory has room for enough rows.
  constexpr bool kBehind = Threads::kSpansBlocks && W::RING && sizeof(X) == 2;

  ring.start(team, rows, team.index, x_data, dy_data);
  const Weight<void, W> scale(team, p.scale, p.scale_offset, 1.0f);
  Row<X, W> x;
  Row<DY, W> dy;
  ColumnSums<W> dscale;
  std::conditional_t<BIAS, ColumnSums<W>, NoSums> dbias;

  for (int64_t part = team.index; part < partials.rows; part += team.count) {
    if (part > team.index) ring.start(team, rows, part, x_data, dy_data);
    dscale.clear();
    dbias.clear();
    const int64_t first_row = part * rows.group + team.place;
    RowStatistics fetched, newest{}, oldest;
    fetched.template fetch<KIND>(p, first_row);
    // Teams of a warp leave a row together, so they go on as long as one of them has one.
    const int64_t end = p.rows + (kBehind ? stride : 0) + team.place % Threads::kTeamsOfWarp;
    for (int64_t next = first_row; next < end; next += stride) {
      if (Threads::kTeamsOfWarp > 1 && next >= p.rows) {
        ring.take();
        ring.leave();
        break;
      }
      oldest = newest;
      if (!kBehind || next < p.rows) {
        newest = fetched;
        ring.take();
        if constexpr (W::RING) {
          x.read(team, ring.newest_a());
          dy.read(team, ring.newest_b());
        } else {
          x.read(team, x_data + next * p.cols);
          dy.read(team, dy_data + next * p.cols);
        }
        fetched.template fetch<KIND>(p, next + stride);

        float g_sum = 0, gx_sum = 0;
        for_each_vector<W>(team, [&](int slot, int64_t first, int valid) {
          float x_hat[W::N], g[W::N], factor[W::N], g_part = 0, gx_part = 0;
          x.get(slot, first, valid, x_hat);
          dy.get(slot, first, valid, g);
          scale.get(slot, first, valid, factor);
#pragma unroll
          for (int i = 0; i < W::N; ++i) {
            x_hat[i] = newest.template x_hat<KIND>(x_hat[i]);
            dscale.value[slot][i] = fmaf(g[i], x_hat[i], dscale.value[slot][i]);
            if constexpr (BIAS) dbias.value[slot][i] += g[i];
            g[i] *= factor[i];
            if (kLayer) g_part += g[i];
            gx_part = fmaf(g[i], x_hat[i], gx_part);
          }
          g_sum += g_part;
          gx_sum += gx_part;
        });
        Part warp_sums;
        warp_sums.value[0] = team.warp_sum(gx_sum);
        if constexpr (kLayer) warp_sums.value[1] = team.warp_sum(g_sum);
        team.publish(warp_sums);
        ring.met();
      }
      if (kBehind && next == first_row) continue;
      const int64_t row = kBehind ? next - stride : next;
      const Part sums = team.collect();
      if (p.dx.data) {
        // rstd * (g - mean(g) - x_hat * mean(g * x_hat))
        const RowStatistics s = kBehind ? oldest : newest;
        const float slope = sums.value[0] * team.reciprocal() * s.rstd;
        const float level = kLayer ? sums.value[kLayer ? 1 : 0] * team.reciprocal() * s.rstd : 0.0f;
        if constexpr (kBehind) {
          x.read(team, ring.oldest_a());
          dy.read(team, ring.oldest_b());
        }
        for_each_vector<W>(team, [&](int slot, int64_t first, int valid) {
          float x_hat[W::N], g[W::N], factor[W::N];
          x.get(slot, first, valid, x_hat);
          dy.get(slot, first, valid, g);
          scale.get(slot, first, valid, factor);
#pragma unroll
          for (int i = 0; i < W::N; ++i) {
            x_hat[i] = s.template x_hat<KIND>(x_hat[i]);
            g[i] = fmaf(g[i] * factor[i], s.rstd, -(kLayer ? fmaf(x_hat[i], slope, level) : x_hat[i] * slope));
          }
          store(static_cast<X*>(p.dx.data) + row * p.cols + first, pack<X>(g), valid, W::ALIGNED);
        });
      }
      ring.leave();
    }
    __syncthreads();  // the ring is empty, and its memory may serve for sums
    float* const space = reinterpret_cast<float*>(shared);
    if (partials.dscale) dscale.write(team, rows.group, space, partials.dscale + part * p.cols);
    if constexpr (BIAS)
      if (partials.dbias) dbias.write(team, rows.group, space, partials.dbias + part * p.cols);
  }
}

template <Kind KIND, bool BIAS, typename X, typename DY, typename R>
__global__ void __launch_bounds__(kMaxThreads)
    backward_kernel(const __grid_constant__ Backward p, const __grid_constant__ Partials partials,
                    const __grid_constant__ RowsLaunch launch) {
  if constexpr (R::kCluster > 1 && !kHasClusters) return;
  extern __shared__ __align__(128) char shared[];
  if (launch.access == Access::ring) {
    if constexpr (kHasClusters) backward_rows<KIND, BIAS, X, DY, R, Access::ring>(p, partials, launch, shared);
  } else if (R::kCluster == 1 && launch.access == Access::vectors) {
    if constexpr (R::kCluster == 1) backward_rows<KIND, BIAS, X, DY, R, Access::vectors>(p, partials, launch, shared);
  } else {
    backward_rows<KIND, BIAS, X, DY, R, Access::elements>(p, partials, launch, shared);
  }
}

template <typename X, typename F>
cudaError_t with_backward_regime(const Plan& plan, F f) {
  constexpr int most = kElements / kVector<X>;
  if (plan.blocks_per_row > 1) return f(Regime<kWholeBlock, most, kMaxCluster>{});
  if (plan.threads_per_row > kWarp) return f(Regime<kWholeWarps, most, 1>{});
  if (plan.threads_per_row == kWarp) return f(Regime<kWarp, most, 1>{});
  if (plan.threads_per_row == 16) return f(Regime<16, most, 1>{});
  if (plan.vectors == 1) return f(Regime<8, 1, 1>{});
  return plan.vectors == 2 ? f(Regime<8, 2, 1>{}) : f(Regime<8, most, 1>{});
}

template <Kind KIND, bool BIAS, typename X, typename DY>
cudaError_t launch_rows(const Backward& p, const Plan& plan, const Partials& partials, bool aligned,
                        cudaStream_t stream) {
  constexpr int own_bytes = 2 << 10;  // of shared memory, more than any kernel here declares
  RowsLaunch launch(plan, p.cols, kVector<X>, aligned);
  int shared = 0;
  if (aligned && is_bulk(p.x.dtype, p.x.data, p.cols) && is_bulk(p.dy.dtype, p.dy.data, p.cols))
    shared = launch.with_rings(plan, p.cols, sizeof(X), sizeof(DY), own_bytes);
  if (plan.rows_per_block > 1)
    shared = std::max(shared, plan.block_threads() * kElements * static_cast<int>(sizeof(float)));
  if (plan.blocks_per_row > 1 && launch.access == Access::vectors) launch.access = Access::elements;
  const int64_t teams = std::min<int64_t>(partials.rows, current_device().teams_at_once(plan.blocks_per_row));
  return with_backward_regime<X>(plan, [&](auto regime) {
    return launch_teams(backward_kernel<KIND, BIAS, X, DY, decltype(regime)>, plan, teams, shared, stream, p, partials,
                        launch);
  });
}

}  // namespace jaxnorm::cuda
