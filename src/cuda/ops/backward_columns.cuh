// The backward by columns, for rows too long for a thread group.
//
// A row's dx needs two sums over the row, so such rows are read twice: one kernel sums up every segment of a row, the
// next finishes dx and adds up dscale and dbias, column by column. The first takes the rows in reverse, for the
// reason that RowsLaunch::backwards gives, and the second does not: it finds in the cache those that the first read
// last.
#pragma once

#include "cuda/ops/backward_rows.cuh"

namespace jaxnorm::cuda {

// The sums of g * x_hat and of g over a row or a part of it.
struct SegmentSums {
  float gx, g;
};

__device__ inline SegmentSums sum_over_warp(SegmentSums sums) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sums.gx += __shfl_xor_sync(0xffffffffu, sums.gx, offset);
    sums.g += __shfl_xor_sync(0xffffffffu, sums.g, offset);
  }
  return sums;
}

// What dy is multiplied by, whatever type scale has, if there is one.
template <bool ALIGNED, int N>
__device__ void load_factor(const Backward& p, int64_t first, int left, float (&factor)[N]) {
  if (p.scale.data) load_floats<ALIGNED>(p.scale, first, left, factor);
#pragma unroll
  for (int i = 0; i < N; ++i) factor[i] = p.scale.data ? factor[i] + p.scale_offset : 1.0f;
}

// T: scale's type, if it is known; void: scale may also be absent.
template <Kind KIND, typename X, typename DY, typename T, typename Tile>
__device__ SegmentSums thread_sums(const Backward& p, int64_t row, int64_t begin) {
  const int64_t dy_stride = Tile::ALIGNED ? p.cols : p.cols + p.dy_pad;
  RowStatistics s;
  s.template fetch<KIND>(p, row);
  s = s.bounded();
  SegmentSums sums{};
#pragma unroll
  for (int slot = 0; slot < Tile::VECTORS; ++slot) {
    const int64_t first = begin + (slot * kSegmentThreads + threadIdx.x) * Tile::N;
    if (first >= p.cols) continue;
    const int left = static_cast<int>(min(static_cast<int64_t>(Tile::N), p.cols - first));
    float x[Tile::N], g[Tile::N], factor[Tile::N];
    unpack(load<Tile::ALIGNED, Tile::N>(static_cast<const X*>(p.x.data) + row * p.cols + first, left), x);
    unpack(load<Tile::ALIGNED, Tile::N>(static_cast<const DY*>(p.dy.data) + row * dy_stride + first, left), g);
    if constexpr (std::is_void_v<T>) {
      load_factor<Tile::ALIGNED>(p, first, left, factor);
    } else {
      unpack(load<Tile::ALIGNED, Tile::N>(static_cast<const T*>(p.scale.data) + first, left), factor);
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) factor[i] += p.scale_offset;
    }
    SegmentSums part{};
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) {
      g[i] *= factor[i];
      part.gx = fmaf(g[i], s.template x_hat<KIND>(x[i]), part.gx);
      part.g += g[i];
    }
    sums.gx += part.gx;
    sums.g += part.g;
  }
  return sums;
}

// Block b sums up segment b % segments of the row that is b / segments before the last.
template <Kind KIND, typename X, typename DY>
__global__ void __launch_bounds__(kSegmentThreads)
    segment_sums_kernel(const __grid_constant__ Backward p, int segments, bool aligned) {
  constexpr int vectors = kSegment / kSegmentThreads / kVector<X>;
  using Aligned = Tiling<X, Regime<kWholeBlock, vectors, 1>, Access::vectors>;
  const int64_t row = p.rows - 1 - blockIdx.x / segments,
                begin = static_cast<int64_t>(blockIdx.x % segments) * kSegment;
  SegmentSums sums;
  if (!aligned) {
    sums =
        thread_sums<KIND, X, DY, void, Tiling<X, Regime<kWholeBlock, vectors, 1>, Access::elementwise>>(p, row, begin);
  } else if (!p.scale.data || p.scale.dtype != kDtype<X>) {
    sums = thread_sums<KIND, X, DY, void, Aligned>(p, row, begin);
  } else {
    sums = thread_sums<KIND, X, DY, X, Aligned>(p, row, begin);
  }

  __shared__ SegmentSums warps[kSegmentThreads / kWarp];
  sums = sum_over_warp(sums);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = sums;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < kSegmentThreads / kWarp; ++warp) {
    sums.gx += warps[warp].gx;
    sums.g += warps[warp].g;
  }
  reinterpret_cast<SegmentSums*>(p.row_sums)[row * segments + blockIdx.x % segments] = sums;
}

// What dx of a row needs besides x and dy.
struct RowScalars {
  float mean, rstd, gx_mean, g_mean;
};

template <Kind KIND>
__device__ RowScalars row_scalars(const Backward& p, int64_t row, int segments) {
  SegmentSums sums{};
  if (p.dx.data) {
    const SegmentSums* parts = reinterpret_cast<const SegmentSums*>(p.row_sums) + row * segments;
    for (int i = threadIdx.x % kWarp; i < segments; i += kWarp) {
      sums.gx += parts[i].gx;
      sums.g += parts[i].g;
    }
    sums = sum_over_warp(sums);
  }
  const bool layer = KIND == Kind::layer;
  return {layer ? p.mean[row] : 0.0f, p.rstd[row], sums.gx / p.cols, layer ? sums.g / p.cols : 0.0f};
}

// Thread t of the grid's x axis owns vector t of every row; block y of the grid goes through every gridDim.y-th row,
// from the y-th on, and leaves row y of the partial sums. ADD: there is a dsum.
template <Kind KIND, typename X, typename DY, bool ALIGNED, bool ADD>
__device__ __forceinline__ void finish_columns(const Backward& p, const Partials& partials, int segments) {
  constexpr int N = kVector<X>, kRows = 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  const int left = static_cast<int>(max(int64_t{0}, min(static_cast<int64_t>(N), p.cols - first)));
  float factor[N], dscale[N] = {}, dbias[N] = {};
  load_factor<ALIGNED>(p, first, left, factor);

  __shared__ RowScalars scalars[kRows];
  const int64_t step = gridDim.y;
  for (int64_t begin = blockIdx.y; begin < p.rows; begin += kRows * step) {
    const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), (p.rows - 1 - begin) / step + 1));
    __syncthreads();
    for (int i = threadIdx.x / kWarp; i < rows; i += blockDim.x / kWarp) {
      const RowScalars s = row_scalars<KIND>(p, begin + i * step, segments);
      if (threadIdx.x % kWarp == 0) scalars[i] = s;
    }
    __syncthreads();
    if (ALIGNED && left == 0) continue;
#pragma unroll(ADD ? 1 : 2)
    for (int i = 0; i < rows; ++i) {
      const int64_t row = begin + i * step, at = row * p.cols + first;
      const int64_t dy_at = ALIGNED ? at : at + row * p.dy_pad;
      const RowScalars s = scalars[i];
      float x[N], dy[N];
      unpack(load<ALIGNED, N>(static_cast<const X*>(p.x.data) + at, left), x);
      unpack(load<ALIGNED, N>(static_cast<const DY*>(p.dy.data) + dy_at, left), dy);
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const float x_hat = (x[e] - s.mean) * s.rstd;
        dscale[e] = fmaf(dy[e], x_hat, dscale[e]);
        dbias[e] += dy[e];
        x[e] = s.rstd * fmaf(-x_hat, s.gx_mean, dy[e] * factor[e] - s.g_mean);
      }
      if (!p.dx.data) continue;
      if constexpr (ADD) {
        unpack(load<ALIGNED, N>(static_cast<const X*>(p.dsum.data) + at, left), dy);
        accumulate(x, dy);
      }
      X* const dx = static_cast<X*>(p.dx.data) + at;
      if constexpr (ALIGNED) {
        store_streaming(dx, pack<X>(x));
      } else {
        store<false>(dx, pack<X>(x), left);
      }
    }
  }
  const int64_t sums_at = static_cast<int64_t>(blockIdx.y) * p.cols + first;
  if (partials.dscale) store<ALIGNED>(partials.dscale + sums_at, pack<float>(dscale), left);
  if (partials.dbias) store<ALIGNED>(partials.dbias + sums_at, pack<float>(dbias), left);
}

template <Kind KIND, typename X, typename DY>
__global__ void __launch_bounds__(kColumnThreads, 2)
    columns_kernel(const __grid_constant__ Backward p, const __grid_constant__ Partials partials, int segments,
                   bool aligned) {
  const bool add = p.dsum.data;
  if (aligned) {
    add ? finish_columns<KIND, X, DY, true, true>(p, partials, segments)
        : finish_columns<KIND, X, DY, true, false>(p, partials, segments);
  } else {
    add ? finish_columns<KIND, X, DY, false, true>(p, partials, segments)
        : finish_columns<KIND, X, DY, false, false>(p, partials, segments);
  }
}

// dx, if it is wanted, and the sums that `partials` asks for. Rows of dy that are padded go the slow way: those that
// lie side by side have no registers for it.
template <Kind KIND, typename X, typename DY>
cudaError_t launch_columns(const Backward& p, int segments, Partials partials, bool aligned, cudaStream_t stream) {
  aligned = aligned && p.dy_pad == 0;
  if (p.dx) {
    const dim3 grid(static_cast<unsigned>(p.rows * segments));
    const auto error =
        launch_grid(segment_sums_kernel<KIND, X, DY>, grid, kSegmentThreads, stream, p, segments, aligned);
    if (error != cudaSuccess) return error;
  }
  constexpr int strip = kColumnThreads * kVector<X>;
  const dim3 grid(static_cast<unsigned>((p.cols + strip - 1) / strip), static_cast<unsigned>(partials.rows));
  return launch_grid(columns_kernel<KIND, X, DY>, grid, kColumnThreads, stream, p, partials, segments, aligned);
}

}  // namespace jaxnorm::cuda
