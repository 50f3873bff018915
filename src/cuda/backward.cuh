// The backward of both norms. With g = dy * (scale + scale_offset) and x_hat rebuilt from the saved statistics,
//   dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat))      (no mean(g) for RMS)
//   dscale = sum over rows of dy * x_hat,   dbias = sum over rows of dy.
//
// The sums over rows have two stages, both in a fixed order: each team adds up its rows in registers and leaves one row of
// partial sums per block or cluster in the workspace; sum_partials_kernel adds those.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/norms.h"
#include "cuda/row.cuh"

namespace jaxnorm::cuda {

// The workspace: for dscale, then for dbias, if asked: `rows` rows of `cols` partial sums, of which the first `used` count.
struct Partials {
  float *dscale, *dbias;
  int64_t rows, used;
};

// The running sums of a team's rows, one float for each element that a thread owns.
template <int N, int VECTORS>
struct ColumnSums {
  float value[VECTORS][N] = {};

  // One row of partial sums from the teams of a block, or of a cluster: a team that has the block for itself owns its
  // columns; teams that share the block add theirs in turn.
  template <typename Team>
  __device__ void write(const Team& team, float* to, int64_t cols, bool aligned) const {
    if constexpr (Team::kSpansWarps) {
      for_each_vector<N, VECTORS>(team, cols, [&](int slot, int64_t first, int valid) {
        store(to + first, pack<float>(value[slot]), valid, aligned);
      });
    } else {
      __shared__ float sums[N * VECTORS * kWarpSize];
      for (int turn = 0; turn < static_cast<int>(blockDim.x) / team.size; ++turn) {
        if (static_cast<int>(threadIdx.x) / team.size == turn) {
          for_each_vector<N, VECTORS>(team, cols, [&](int slot, int64_t first, int valid) {
#pragma unroll
            for (int i = 0; i < N; ++i)
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

// g = dy * (scale + scale_offset).
template <int N>
__device__ void scale_cotangent(const Backward& p, int64_t first, int valid, bool aligned, float (&dy)[N]) {
  if (!p.scale.data) return;
  float scale[N];
  load_floats(p.scale, first, valid, aligned, scale);
#pragma unroll
  for (int i = 0; i < N; ++i) dy[i] *= scale[i] + p.scale_offset;
}

// dx, and the partial sums of dscale and, for layer norm, of dbias where they are asked for.
template <Kind KIND, typename X, typename DY, typename R>
__global__ void __launch_bounds__(R::kBlockThreads) backward_kernel(Backward p, Partials partials, bool aligned) {
  constexpr int N = kVector<X>, VECTORS = R::kVectors;
  constexpr bool kLayer = KIND == Kind::layer;
  constexpr bool kSums = VECTORS != kStreamed;
  if constexpr (R::kCluster && !kHasClusters) return;
  Team<R::kThreads, kLayer ? 2 : 1, R::kCluster> team;
  ColumnSums<N, kSums ? VECTORS : 1> dscale;
  ColumnSums<N, kSums && kLayer ? VECTORS : 1> dbias;

  for_each_row(team, p.rows, [&](int64_t row) {
    const Row<X, N, VECTORS> x(team, p.x.data, row, p.cols, aligned);
    const Row<DY, N, VECTORS> dy(team, p.dy.data, row, p.cols, aligned);
    const float mean = kLayer ? p.mean[row] : 0.0f, rstd = p.rstd[row];

    Accumulator<VECTORS> g_sum = 0, gx_sum = 0;
    for_each_vector<N, VECTORS>(team, p.cols, [&](int slot, int64_t first, int valid) {
      float x_hat[N], g[N], g_part = 0, gx_part = 0;
      x.get(slot, first, valid, x_hat);
      dy.get(slot, first, valid, g);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        x_hat[i] = (x_hat[i] - mean) * rstd;
        if constexpr (kSums) {
          dscale.value[slot][i] += g[i] * x_hat[i];
          if constexpr (kLayer) dbias.value[slot][i] += g[i];
        }
      }
      scale_cotangent(p, first, valid, aligned, g);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        g_part += g[i];
        gx_part += g[i] * x_hat[i];
      }
      g_sum += g_part;
      gx_sum += gx_part;
    });

    float g_mean = 0, gx_mean;
    if constexpr (kLayer) {
      team.publish({static_cast<float>(team.warp_sum(gx_sum)), static_cast<float>(team.warp_sum(g_sum))});
      gx_mean = team.sum([](const float(&entry)[2]) { return entry[0]; }) / p.cols;
      g_mean = team.sum([](const float(&entry)[2]) { return entry[1]; }) / p.cols;
    } else {
      team.publish({static_cast<float>(team.warp_sum(gx_sum))});
      gx_mean = team.sum([](const float(&entry)[1]) { return entry[0]; }) / p.cols;
    }

    for_each_vector<N, VECTORS>(team, p.cols, [&](int slot, int64_t first, int valid) {
      float dx[N], g[N];
      x.get(slot, first, valid, dx);
      dy.get(slot, first, valid, g);
      scale_cotangent(p, first, valid, aligned, g);
#pragma unroll
      for (int i = 0; i < N; ++i) dx[i] = rstd * (g[i] - g_mean - (dx[i] - mean) * rstd * gx_mean);
      store(static_cast<X*>(p.dx.data) + row * p.cols + first, pack<X>(dx), valid, aligned);
    });
  });

  if constexpr (kSums) {
    if (partials.dscale) dscale.write(team, partials.dscale + team.index * p.cols, p.cols, aligned);
    if constexpr (kLayer)
      if (partials.dbias) dbias.write(team, partials.dbias + team.index * p.cols, p.cols, aligned);
  }
}

// The partial sums alone, by columns: for rows too long for registers, and where no dx is wanted. Thread t of the grid's
// x axis owns vector t; block y adds rows y, y + gridDim.y, ...
template <Kind KIND, typename X, typename DY>
__global__ void columns_kernel(Backward p, Partials partials, bool aligned) {
  constexpr int N = kVector<X>;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (first >= p.cols) return;
  const int valid = static_cast<int>(min(static_cast<int64_t>(N), p.cols - first));

  float dscale[N] = {}, dbias[N] = {};
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const int64_t offset = row * p.cols + first;
    float x[N], dy[N];
    unpack(load<N>(static_cast<const X*>(p.x.data) + offset, valid, aligned), x);
    unpack(load<N>(static_cast<const DY*>(p.dy.data) + offset, valid, aligned), dy);
    const float mean = KIND == Kind::layer ? p.mean[row] : 0.0f, rstd = p.rstd[row];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      dscale[i] += dy[i] * (x[i] - mean) * rstd;
      dbias[i] += dy[i];
    }
  }
  const int64_t to = static_cast<int64_t>(blockIdx.y) * p.cols + first;
  if (partials.dscale) store(partials.dscale + to, pack<float>(dscale), valid, aligned);
  if (partials.dbias) store(partials.dbias + to, pack<float>(dbias), valid, aligned);
}

// Adds the partial sums, 32 columns a block: warp w adds partial rows w, w + 32, ..., then warp 0 adds the warps' sums.
static __global__ void __launch_bounds__(1024) sum_partials_kernel(Backward p, Partials partials) {
  const bool is_scale = blockIdx.y == 0 && partials.dscale;
  const float* from = is_scale ? partials.dscale : partials.dbias;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  __shared__ float sums[32][33];

  float sum = 0;
  if (col < p.cols)
    for (int64_t row = threadIdx.y; row < partials.used; row += 32) sum += from[row * p.cols + col];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= p.cols) return;
  sum = 0;
  for (int i = 0; i < 32; ++i) sum += sums[i][threadIdx.x];
  store_float(is_scale ? p.dscale : p.dbias, col, sum);
}

template <Kind KIND, typename X, typename DY>
cudaError_t launch_dx(const Backward& p, const Plan& plan, Partials partials, bool aligned, cudaStream_t stream) {
  constexpr int most = 32 / kVector<X>;
  const bool sums = partials.dscale || partials.dbias;
  const int64_t teams = sums ? std::min(p.rows, partials.used * plan.rows_per_block) : p.rows;
  return with_regime<most>(plan, [&](auto regime) {
    return launch(backward_kernel<KIND, X, DY, decltype(regime)>, plan, teams, stream, p, partials, aligned);
  });
}

template <Kind KIND, typename X, typename DY>
cudaError_t launch_columns(const Backward& p, Partials partials, bool aligned, cudaStream_t stream) {
  constexpr int threads = 128, per_block = threads * kVector<X>;
  const dim3 grid(static_cast<unsigned>((p.cols + per_block - 1) / per_block), static_cast<unsigned>(partials.used));
  columns_kernel<KIND, X, DY><<<grid, threads, 0, stream>>>(p, partials, aligned);
  return cudaGetLastError();
}

template <Kind KIND, typename X, typename DY>
cudaError_t launch_backward(const Backward& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const Plan plan = make_plan(Op::backward, kDtype<X>, p.cols, max_cluster());
  const bool aligned = p.cols % N == 0 && aligned_for<N>(p.x.dtype, p.x.data) && aligned_for<N>(p.dy.dtype, p.dy.data) &&
                       aligned_for<N>(p.dx.dtype, p.dx.data) && aligned_for<N>(p.scale.dtype, p.scale.data) &&
                       aligned_for<N>(Dtype::f32, p.workspace);

  Partials partials{};
  partials.rows = partial_rows(kDtype<X>, p.cols);
  partials.used = std::min(partials.rows, (p.rows + plan.rows_per_block - 1) / plan.rows_per_block);
  if (p.dscale) partials.dscale = p.workspace;
  if (p.dbias) partials.dbias = p.workspace + (p.dscale ? partials.rows * p.cols : 0);

  // What the dx kernel sums on its way; the columns kernel sums the rest.
  const bool in_registers = p.dx && plan.vectors != kStreamed;
  Partials on_the_way = partials, rest = partials;
  (in_registers ? rest : on_the_way).dscale = nullptr;
  (in_registers && KIND == Kind::layer ? rest : on_the_way).dbias = nullptr;

  cudaError_t error = cudaSuccess;
  if (p.rows > 0 && p.dx) error = launch_dx<KIND, X, DY>(p, plan, on_the_way, aligned, stream);
  if (error == cudaSuccess && p.rows > 0 && (rest.dscale || rest.dbias))
    error = launch_columns<KIND, X, DY>(p, rest, aligned, stream);
  if (error != cudaSuccess || !(p.dscale || p.dbias)) return error;
  const dim3 grid(static_cast<unsigned>((p.cols + 31) / 32), p.dscale && p.dbias ? 2 : 1);
  sum_partials_kernel<<<grid, dim3(32, 32), 0, stream>>>(p, partials);
  return cudaGetLastError();
}

template <Kind KIND, typename X>
cudaError_t backward_of_kind(const Backward& p, cudaStream_t stream) {
  if (p.dy.dtype == kDtype<X>) return launch_backward<KIND, X, X>(p, stream);
  if constexpr (std::is_same_v<X, float>)
    return p.dy.dtype == Dtype::f16 ? launch_backward<KIND, X, __half>(p, stream)
                                    : launch_backward<KIND, X, __nv_bfloat16>(p, stream);
  return launch_backward<KIND, X, float>(p, stream);
}

template <typename X>
cudaError_t backward_of(const Backward& p, cudaStream_t stream) {
  return p.kind == Kind::rms ? backward_of_kind<Kind::rms, X>(p, stream) : backward_of_kind<Kind::layer, X>(p, stream);
}

}  // namespace jaxnorm::cuda
