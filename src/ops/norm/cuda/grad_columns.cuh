// The gradient column by column, for rows too long for a thread group.
//
// A row's dx needs sums over the row, so such rows are read twice: one kernel sums up every segment of a row, the next
// finishes dx and adds up dscale and dbias, column by column. The first takes the rows in reverse, for the reason that
// RowsLaunch::backwards gives, and the second does not: it finds in the cache those that the first read last.
#pragma once

#include "ops/norm/cuda/grad_row.cuh"
#include "ops/norm/cuda/plan.h"

namespace jaxnorm::cuda {

// The sums of g * x_hat and of g over a row or a part of it.
struct SegmentSums {
  float gx, g;

  __device__ void add(const SegmentSums& more) {
    gx += more.gx;
    g += more.g;
  }
};

// Where those of each row are, of `count` segments. A segment is `pieces` times kSegment columns, or what is left of
// the row, and has a launch for each piece: more than one only where the workspace has little room.
struct Segments {
  SegmentSums* sums;
  int count, pieces, piece;
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
template <bool ALIGNED, int N, typename Call>
__device__ void load_factor(const Call& p, int64_t col, int remaining, float (&factor)[N]) {
  if (p.scale.data) load_floats<ALIGNED>(p.scale, col, remaining, factor);
#pragma unroll
  for (int i = 0; i < N; ++i) factor[i] = p.scale.data ? factor[i] + p.scale_offset : 1.0f;
}

// A thread's sums of the kSegment columns from `begin` on. T: scale's type, if it is known; void: scale may also be
// absent.
template <typename Op, typename T, typename Tile>
__device__ SegmentSums thread_sums(const GradCall<typename Op::State>& p, int64_t row, int64_t begin) {
  constexpr int N = Tile::N;
  const int64_t dy_stride = Tile::ALIGNED ? p.cols : p.cols + p.dy_pad;
  typename Op::Scalars s{};
  fetch_scalars<Op>(p, row, s);
  SegmentSums sums{};
#pragma unroll
  for (int vec = 0; vec < Tile::VECTORS; ++vec) {
    const int64_t col = begin + (vec * kSegmentThreads + threadIdx.x) * N;
    if (col >= p.cols) continue;
    const int remaining = static_cast<int>(min(static_cast<int64_t>(N), p.cols - col));
    float x[N], g[N], factor[N];
    unpack(load<Tile::ALIGNED, N>(static_cast<const typename Op::X*>(p.x.data) + row * p.cols + col, remaining), x);
    unpack(load<Tile::ALIGNED, N>(static_cast<const typename Op::DY*>(p.dy.data) + row * dy_stride + col, remaining),
           g);
    if constexpr (std::is_void_v<T>) {
      load_factor<Tile::ALIGNED>(p, col, remaining, factor);
    } else {
      unpack(load<Tile::ALIGNED, N>(static_cast<const T*>(p.scale.data) + col, remaining), factor);
#pragma unroll
      for (int i = 0; i < N; ++i) factor[i] += p.scale_offset;
    }
    SegmentSums part{};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      g[i] *= factor[i];
      part.gx = fmaf(g[i], Tile::ALIGNED || i < remaining ? s.x_hat(x[i]) : 0.0f, part.gx);
      part.g += g[i];
    }
    sums.add(part);
  }
  return sums;
}

// Block b sums up segment b % segments.count of the row that is b / segments.count before the last.
template <typename Op>
__global__ void __launch_bounds__(kSegmentThreads)
    segment_sums_kernel(const __grid_constant__ GradCall<typename Op::State> p,
                        const __grid_constant__ Segments segments, bool aligned) {
  using X = typename Op::X;
  using R = Regime<kWholeBlock, kSegment / kSegmentThreads / kVector<X>, 1>;
  using Aligned = Tiling<X, R, Access::vectors>;
  const int segment = static_cast<int>(blockIdx.x % segments.count);
  const int64_t row = p.rows - 1 - blockIdx.x / segments.count,
                begin = static_cast<int64_t>(segment * segments.pieces + segments.piece) * kSegment;
  SegmentSums sums;
  if (!aligned) {
    sums = thread_sums<Op, void, Tiling<X, R, Access::elementwise>>(p, row, begin);
  } else if (!p.scale.data || p.scale.dtype != kDtype<X>) {
    sums = thread_sums<Op, void, Aligned>(p, row, begin);
  } else {
    sums = thread_sums<Op, X, Aligned>(p, row, begin);
  }

  __shared__ SegmentSums warps[kSegmentThreads / kWarp];
  sums = sum_over_warp(sums);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = sums;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < kSegmentThreads / kWarp; ++warp) sums.add(warps[warp]);
  SegmentSums& of_segment = segments.sums[row * segments.count + segment];
  if (segments.piece > 0) sums.add(of_segment);
  of_segment = sums;
}

// What dx of a row needs besides x and dy.
template <typename Op>
struct alignas(16) ColumnScalars {
  typename Op::Scalars::Dx dx;
  typename Op::Scalars s;
};

// By a whole warp.
template <typename Op>
__device__ ColumnScalars<Op> column_scalars(const GradCall<typename Op::State>& p, int64_t row,
                                            const Segments& segments) {
  SegmentSums sums{};
  if (p.dx.data) {
    const SegmentSums* const parts = segments.sums + row * segments.count;
    for (int i = threadIdx.x % kWarp; i < segments.count; i += kWarp) sums.add(parts[i]);
    sums = sum_over_warp(sums);
  }
  constexpr int kSums = Op::Scalars::kSums;
  Sums<kSums> of_row;
  of_row.value[0] = sums.gx;
  if constexpr (kSums == 2) of_row.value[1] = sums.g;
  typename Op::Scalars s;
  Op(p.state).fetch(row, s);
  return {s.dx(of_row, 1.0f / static_cast<float>(p.cols)), s};
}

// Thread t of the grid's x axis owns vector t of every row; block y of the grid goes through every gridDim.y-th row,
// from the y-th on, and leaves row y of the partial sums. ADD: there is an extra operand.
template <typename Op, bool ALIGNED, bool ADD>
__device__ __forceinline__ void finish_columns(const GradCall<typename Op::State>& p, const Partials& partials,
                                               const Segments& segments) {
  using X = typename Op::X;
  using DY = typename Op::DY;
  constexpr int N = kVector<X>, kRows = 32;
  const int64_t col = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  const int remaining = static_cast<int>(max(int64_t{0}, min(static_cast<int64_t>(N), p.cols - col)));
  float factor[N], dscale[N] = {}, dbias[N] = {};
  load_factor<ALIGNED>(p, col, remaining, factor);

  __shared__ ColumnScalars<Op> scalars[kRows];
  const int64_t stride = gridDim.y;
  for (int64_t begin = blockIdx.y; begin < p.rows; begin += kRows * stride) {
    const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), (p.rows - 1 - begin) / stride + 1));
    __syncthreads();
    for (int i = threadIdx.x / kWarp; i < rows; i += blockDim.x / kWarp) {
      const ColumnScalars<Op> own = column_scalars<Op>(p, begin + i * stride, segments);
      if (threadIdx.x % kWarp == 0) scalars[i] = own;
    }
    __syncthreads();
    if (ALIGNED && remaining == 0) continue;
#pragma unroll(ADD ? 1 : 2)
    for (int i = 0; i < rows; ++i) {
      const int64_t row = begin + i * stride, at = row * p.cols + col;
      const int64_t dy_at = ALIGNED ? at : at + row * p.dy_pad;
      const ColumnScalars<Op>& own = scalars[i];
      float x[N], dy[N];
      unpack(load<ALIGNED, N>(static_cast<const X*>(p.x.data) + at, remaining), x);
      unpack(load<ALIGNED, N>(static_cast<const DY*>(p.dy.data) + dy_at, remaining), dy);
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const float x_hat = own.s.x_hat(x[e]);
        dscale[e] = fmaf(dy[e], x_hat, dscale[e]);
        dbias[e] += dy[e];
        x[e] = own.dx(dy[e] * factor[e], x_hat);
      }
      if (!p.dx.data) continue;
      if constexpr (ADD) {
        unpack(load<ALIGNED, N>(static_cast<const X*>(p.extra.data) + at, remaining), dy);
        accumulate(x, dy);
      }
      X* const dx = static_cast<X*>(p.dx.data) + at;
      if constexpr (ALIGNED) {
        store_streaming(dx, pack<X>(x));
      } else {
        store<false>(dx, pack<X>(x), remaining);
      }
    }
  }
  const int64_t sums_at = static_cast<int64_t>(blockIdx.y) * p.cols + col;
  if (partials.dscale) store<ALIGNED>(partials.dscale + sums_at, pack<float>(dscale), remaining);
  if (partials.dbias) store<ALIGNED>(partials.dbias + sums_at, pack<float>(dbias), remaining);
}

template <typename Op>
__global__ void __launch_bounds__(kColumnThreads, 2)
    columns_kernel(const __grid_constant__ GradCall<typename Op::State> p, const __grid_constant__ Partials partials,
                   const __grid_constant__ Segments segments, bool aligned) {
  const bool add = p.extra.data;
  if (aligned) {
    add ? finish_columns<Op, true, true>(p, partials, segments)
        : finish_columns<Op, true, false>(p, partials, segments);
  } else {
    add ? finish_columns<Op, false, true>(p, partials, segments)
        : finish_columns<Op, false, false>(p, partials, segments);
  }
}

// dx, if it is wanted, and the sums that room.partials asks for. Rows of dy that are padded go the slow way: those that
// lie side by side have no registers for it.
template <typename Op>
cudaError_t launch_columns(const GradCall<typename Op::State>& p, const GradRoom& room, bool aligned,
                           cudaStream_t stream) {
  using X = typename Op::X;
  aligned = aligned && p.dy_pad == 0;
  const int64_t pieces = (p.cols + kSegment - 1) / kSegment;
  Segments segments{reinterpret_cast<SegmentSums*>(room.row_sums), room.segments, 1, 0};
  if (p.dx) {
    segments.pieces = static_cast<int>((pieces + segments.count - 1) / segments.count);
    const dim3 grid(static_cast<unsigned>(p.rows * segments.count));
    for (; segments.piece < segments.pieces; ++segments.piece) {
      const auto error = launch_grid(segment_sums_kernel<Op>, grid, kSegmentThreads, stream, p, segments, aligned);
      if (error != cudaSuccess) return error;
    }
  }
  constexpr int strip = kColumnThreads * kVector<X>;
  const dim3 grid(static_cast<unsigned>((p.cols + strip - 1) / strip), static_cast<unsigned>(room.partials.rows));
  return launch_grid(columns_kernel<Op>, grid, kColumnThreads, stream, p, room.partials, segments, aligned);
}

}  // namespace jaxnorm::cuda
