// The gradient of a small batch of rows, in one kernel: some blocks compute results of rows, as ever, the others dscale
// and dbias of a strip of columns. x and dy are read twice, but once from the cache, and there are no partial sums to
// add up.
#pragma once

#include "ops/norm/cuda/grad_loop.cuh"

namespace jaxnorm::cuda {

constexpr int kStrip = 8;  // vectors, each of one thread of a row

// What the kernel has to know, and no more: with all arguments of a call it would take longer to start.
template <typename State>
struct SmallBatchGrad {
  const void *x, *dy, *extra;
  void* dx;
  Input scale;
  int rows, cols, dy_stride;
  float reciprocal_cols, scale_offset;
  int threads_per_row, rows_per_block;
  unsigned row_blocks = 0;
  RowMapLaunch weight_rows;
  Output dscale, dbias;
  State state;

  SmallBatchGrad(const GradCall<State>& p, const Plan& plan, const RowMap& weight_rows, Output dscale, Output dbias)
      : x(p.x.data),
        dy(p.dy.data),
        extra(p.extra.data),
        dx(p.dx.data),
        scale(p.scale),
        rows(static_cast<int>(p.rows)),
        cols(static_cast<int>(p.cols)),
        dy_stride(static_cast<int>(p.cols + p.dy_pad)),
        reciprocal_cols(1.0f / static_cast<float>(p.cols)),
        scale_offset(p.scale_offset),
        threads_per_row(plan.threads_per_row),
        rows_per_block(plan.rows_per_block),
        weight_rows(weight_rows),
        dscale(dscale),
        dbias(dbias),
        state(p.state) {}
};

// A thread's sums of dscale and of dbias over rows of a weight row, of the vector at column `col`: of every
// blockDim.x / kStrip-th row.
template <typename Op, int N>
__device__ void sum_over_rows(const SmallBatchGrad<typename Op::State>& p, int weight_row, int col, int remaining,
                              float (&sums)[2][N]) {
  const int rows = static_cast<int>(p.weight_rows.count.quotient(p.rows));
  const auto read = [&](const void* array, int64_t row_at, float (&to)[N]) {
    unpack(load<true, N>(static_cast<const typename Op::X*>(array) + row_at + col, remaining), to);
  };
#pragma unroll 4
  for (int index = threadIdx.x / kStrip; index < rows; index += blockDim.x / kStrip) {
    const int64_t row = p.weight_rows.row_of(weight_row, index);
    typename Op::Scalars s{};
    fetch_scalars<Op>(p, row, s);
    float x[N], dy[N];
    read(p.x, row * p.cols, x);
    read(p.dy, row * p.dy_stride, dy);
    if constexpr (Op::kTransforms) {
      float extra[N];
      read(p.extra, row * p.cols, extra);
      Op(p.state).transform(x, dy, extra);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sums[0][i] = fmaf(dy[i], s.x_hat(x[i]), sums[0][i]);
      sums[1][i] += dy[i];
    }
  }
}

// dscale and dbias of a weight row, of the columns of strip `strip`.
template <typename Op, int MOST>
__device__ void sum_strip(const SmallBatchGrad<typename Op::State>& p, int weight_row, int strip) {
  constexpr int N = kVector<typename Op::X>, kCols = kStrip * N;
  const int col = strip * kCols + static_cast<int>(threadIdx.x) % kStrip * N, remaining = p.cols - col;
  float sums[2][N] = {};
  sum_over_rows<Op>(p, weight_row, col, remaining, sums);

  __shared__ float of_warps[2][MOST / kWarp][kCols];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (k == 1 && !p.dbias.data) break;
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int distance = kStrip; distance < kWarp; distance *= 2)
        sums[k][i] += __shfl_xor_sync(0xffffffffu, sums[k][i], distance);
      if (lane() < kStrip) of_warps[k][threadIdx.x / kWarp][lane() * N + i] = sums[k][i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * kCols; i += blockDim.x) {
    const int k = i / kCols, own = i % kCols;
    const Output& to = k == 0 ? p.dscale : p.dbias;
    if (!to.data || strip * kCols + own >= p.cols) continue;
    float sum = 0;
    for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) sum += of_warps[k][warp][own];
    store_float(to, int64_t{weight_row} * p.cols + strip * kCols + own, sum);
  }
}

// The results of a row.
template <typename Op, typename R>
__device__ __forceinline__ void small_batch_row(const SmallBatchGrad<typename Op::State>& p) {
  using X = typename Op::X;
  using Tile = Tiling<X, R, Access::vectors>;
  ThreadGroup<R::kThreads, Sums<Op::Scalars::kSums>, 1, R::kMost, R::kManyWarps> group(p.threads_per_row, p.cols, 0,
                                                                                       p.reciprocal_cols);
  const int row = static_cast<int>(blockIdx.x) * p.rows_per_block + group.place;
  if (row >= p.rows) return;
  // Each vector's address would be computed from the array's beginning.
  const auto row_of = [&](auto* array, int stride) {
    auto* at = array + int64_t{row} * stride;
    hide(at);
    return at;
  };
  Operands<Op, Tile> operands(Op(p.state));
  operands.x.read(group, row_of(static_cast<const X*>(p.x), p.cols));
  operands.dy.read(group, row_of(static_cast<const X*>(p.dy), p.dy_stride));
  if constexpr (Op::kTransforms) operands.extra.read(group, row_of(static_cast<const X*>(p.extra), p.cols));
  typename Op::Scalars s{};
  fetch_scalars<Op>(p, row, s);
  ScaleOf<Op, Tile> scale(group, from(p.scale, p.weight_rows.of_row(row) * p.cols));
  scale.arrive(p.scale_offset, 1.0f);
  NoColumnSums none;
  group.publish(warp_sums<Op, Tile>(group, s, operands, scale, none, none));
  const auto place = [&](void* array) { return array ? row_of(static_cast<X*>(array), p.cols) : nullptr; };
  const auto finish = [&](const auto& added) {
    finish_row<Op, Tile>(group, s, group.collect(), operands, scale,
                         Op(p.state).template result<Tile>({p.dx, kDtype<X>}, added, place));
  };
  if constexpr (Op::kTransforms || Op::kExtra == Extra::absent) {
    finish(NothingAdded{});
  } else {
    finish(MemoryAdded<X, Tile>{p.extra ? row_of(static_cast<const X*>(p.extra), p.cols) : nullptr});
  }
}

template <typename Op, typename R>
__global__ void __launch_bounds__(R::kMost, Op::kTransforms ? 1 : 2)
    small_batch_grad_kernel(const __grid_constant__ SmallBatchGrad<typename Op::State> p) {
  if (blockIdx.x < p.row_blocks) return small_batch_row<Op, R>(p);
  const int index = static_cast<int>(blockIdx.x - p.row_blocks), count = static_cast<int>(p.weight_rows.count.value);
  const int strip = count == 1 ? index : index / count;
  sum_strip<Op, R::kMost>(p, count == 1 ? 0 : index % count, strip);
}

// The largest small batch.
struct SmallBatchLimits {
  int64_t rows, elements;
};

template <typename State>
bool is_small_batch(const GradCall<State>& p, const Plan& plan, const RowMap& weight_rows, SmallBatchLimits limits) {
  return p.rows > 0 && p.rows <= limits.rows && p.rows * (p.cols + p.dy_pad) <= limits.elements &&
         p.rows % weight_rows.count == 0 && plan.blocks_per_row == 1 && plan.segments == 0;
}

// Whatever the blocks of larger batches, those of small ones have kMaxThreads at most, unless the op has much to
// compute.
template <typename Op, typename Regimes>
cudaError_t launch_small_batch(Regimes regimes, const GradCall<typename Op::State>& p, const Plan& plan,
                               const RowMap& weight_rows, Output dscale, Output dbias, cudaStream_t stream) {
  using X = typename Op::X;
  return with_regime(small_batch_regimes<X>(regimes), plan, [&](auto regime) {
    using R = decltype(regime);
    using Own = std::conditional_t<Op::kTransforms, R, Regime<R::kThreads, R::kVectors, R::kCluster>>;
    constexpr int kCols = kStrip * kVector<X>;
    SmallBatchGrad<typename Op::State> batch(p, plan, weight_rows, dscale, dbias);
    // Where there are more multiprocessors than rows, blocks have few rows. How many sums a strip adds up follows.
    const int threads = p.rows <= kMultiprocessors ? kMaxThreads / 2 : kMaxThreads;
    if (R::kThreads == kWholeWarps) batch.rows_per_block = std::max(1, threads / plan.threads_per_row);
    if (Op(p.state).has_result(p.dx)) batch.row_blocks = (batch.rows + batch.rows_per_block - 1) / batch.rows_per_block;
    const int64_t strips = dscale || dbias ? weight_rows.count * ((p.cols + kCols - 1) / kCols) : 0;
    if (batch.row_blocks + strips == 0) return cudaSuccess;
    return launch_grid(small_batch_grad_kernel<Op, Own>, static_cast<unsigned>(batch.row_blocks + strips),
                       batch.threads_per_row * batch.rows_per_block, stream, batch);
  });
}

}  // namespace jaxnorm::cuda
