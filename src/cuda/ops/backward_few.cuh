// The backward of a few rows, in one kernel: some blocks compute dx of rows, as ever, the others dscale and dbias of a
// strip of columns. x and dy are read twice, but once from the cache, and there are no partial sums to add up.
#pragma once

#include "cuda/engine/launch.cuh"
#include "cuda/ops/backward_gated_row.cuh"

namespace jaxnorm::cuda {

constexpr int kSmallBatchRows = 512, kSmallBatchGatedRows = 64;  // gated: of a head
constexpr int64_t kSmallBatchElements = 1 << 21;
constexpr int kStrip = 8;  // vectors, each of one thread of a row

// What the kernel has to know, and no more: see SmallBatch of the forward.
struct SmallBatchBackward {
  const void *x, *dy;
  const float *mean, *rstd;
  Input scale;
  void* dx;
  const void* dsum;
  int rows, cols, dy_stride;
  float reciprocal_cols, scale_offset;
  int threads_per_row, rows_per_block;
  unsigned row_blocks = 0;
  RowMapLaunch weight_rows;
  Output dscale, dbias;
  Gate gate;
  void* dgate;

  SmallBatchBackward(const Backward& p, const Plan& plan)
      : x(p.x.data),
        dy(p.dy.data),
        mean(p.mean),
        rstd(p.rstd),
        scale(p.scale),
        dx(p.dx.data),
        dsum(p.dsum.data),
        rows(static_cast<int>(p.rows)),
        cols(static_cast<int>(p.cols)),
        dy_stride(static_cast<int>(p.cols + p.dy_pad)),
        reciprocal_cols(1.0f / static_cast<float>(p.cols)),
        scale_offset(p.scale_offset),
        threads_per_row(plan.threads_per_row),
        rows_per_block(plan.rows_per_block),
        weight_rows(p.weight_rows),
        dscale(p.dscale),
        dbias(p.dbias),
        gate(p.gate),
        dgate(p.dgate.data) {}
};

// dscale and dbias of a head, of the columns of strip `strip`: thread i adds up every blockDim.x / kStrip-th row of its
// vector.
template <Kind KIND, Extra EXTRA, typename X, int MOST>
__device__ void sum_strip(const SmallBatchBackward& p, int head, int strip) {
  constexpr int N = kVector<X>, kCols = kStrip * N;
  const int first = strip * kCols + static_cast<int>(threadIdx.x) % kStrip * N, left = p.cols - first;
  const int rows = static_cast<int>(p.weight_rows.count.quotient(p.rows));
  const auto read = [&](const void* array, int64_t row_at, float (&to)[N]) {
    unpack(load<true, N>(static_cast<const X*>(array) + row_at + first, left), to);
  };
  float sums[2][N] = {};  // of dscale and of dbias
#pragma unroll 4
  for (int index = threadIdx.x / kStrip; index < rows; index += blockDim.x / kStrip) {
    const int64_t row = p.weight_rows.row_of(head, index);
    RowStatistics s;
    s.template fetch<KIND>(p, row);
    float x[N], dy[N];
    read(p.x, row * p.cols, x);
    read(p.dy, row * p.dy_stride, dy);
    if constexpr (kIsGate<EXTRA>) {
      float gate[N];
      read(p.gate.data.data, row * p.cols, gate);
      apply_gate<X>(p.gate.activation, p.gate.first, x, dy, gate);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sums[0][i] = fmaf(dy[i], s.template x_hat<KIND>(x[i]), sums[0][i]);
      sums[1][i] += dy[i];
    }
  }

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
    const int k = i / kCols, col = i % kCols;
    const Output& to = k == 0 ? p.dscale : p.dbias;
    if (!to.data || strip * kCols + col >= p.cols) continue;
    float sum = 0;
    for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) sum += of_warps[k][warp][col];
    store_float(to, int64_t{head} * p.cols + strip * kCols + col, sum);
  }
}

template <Kind KIND, Extra EXTRA, typename X, typename R>
__global__ void __launch_bounds__(R::kMost, kIsGate<EXTRA> ? 1 : 2)
    backward_small_batch_kernel(const __grid_constant__ SmallBatchBackward p) {
  if (blockIdx.x >= p.row_blocks) {
    const int strip = static_cast<int>(blockIdx.x - p.row_blocks),
              weight_rows = static_cast<int>(p.weight_rows.count.value);
    const int of_head = weight_rows == 1 ? strip : strip / weight_rows;
    return sum_strip<KIND, EXTRA, X, R::kMost>(p, weight_rows == 1 ? 0 : strip % weight_rows, of_head);
  }
  using Tile = Tiling<X, R, Access::vectors>;
  ThreadGroup<R::kThreads, RowSums<KIND>, 1, R::kMost, R::kManyWarps> group(p.threads_per_row, p.cols, 0,
                                                                            p.reciprocal_cols);
  const int row = static_cast<int>(blockIdx.x) * p.rows_per_block + group.place;
  if (row >= p.rows) return;
  // Each vector's address would be computed from the array's beginning.
  const auto row_of = [&](auto* array, int stride) {
    auto* at = array + int64_t{row} * stride;
    hide(at);
    return at;
  };
  std::conditional_t<kIsGate<EXTRA>, GatedOperands<X, Tile, EXTRA>, Operands<X, X, Tile>> operands;
  operands.x.read(group, row_of(static_cast<const X*>(p.x), p.cols));
  operands.dy.read(group, row_of(static_cast<const X*>(p.dy), p.dy_stride));
  if constexpr (kIsGate<EXTRA>) {
    operands.gate.read(group, row_of(static_cast<const X*>(p.gate.data.data), p.cols));
    operands.how = p.gate;
  }
  RowStatistics s;
  s.template fetch<KIND>(p, row);
  FloatWeight<Tile> scale(group, from(p.scale, p.weight_rows.of_row(row) * p.cols));
  scale.arrive(p.scale_offset, 1.0f);
  NoSums none;
  group.publish(warp_sums<KIND, Tile>(group, s, operands, scale, none, none));
  const auto store = [&](const auto& result) {
    store_dx<KIND, Tile>(group, s, group.collect(), operands, scale, result);
  };
  const auto result_row = [&](void* array) { return array ? row_of(static_cast<X*>(array), p.cols) : nullptr; };
  if constexpr (kIsGate<EXTRA>) {
    store(GatedResult<Tile, X>(result_row(p.dx), result_row(p.dgate)));
  } else {
    const MemoryAdded<X, Tile> added{p.dsum ? row_of(static_cast<const X*>(p.dsum), p.cols) : nullptr};
    store(DxResult<Tile, X, MemoryAdded<X, Tile>>{added, result_row(p.dx)});
  }
}

inline bool is_small_batch(const Backward& p, const Plan& plan) {
  // With a gate strips have much to compute, and not many threads to do it.
  const int64_t most_rows = p.gate ? kSmallBatchGatedRows * p.weight_rows.count : kSmallBatchRows;
  const int64_t most_elements = p.gate ? kSmallBatchElements / 4 : kSmallBatchElements;
  return p.rows > 0 && p.rows <= most_rows && p.rows * (p.cols + p.dy_pad) <= most_elements &&
         p.rows % p.weight_rows.count == 0 && plan.blocks_per_row == 1 && plan.segments == 0;
}

template <Kind KIND, Extra EXTRA, typename X, typename R>
cudaError_t launch_small_batch(const Backward& p, const Plan& plan, cudaStream_t stream) {
  constexpr int kCols = kStrip * kVector<X>;
  SmallBatchBackward batch(p, plan);
  // Where there are more multiprocessors than rows, blocks have few rows.
  const bool is_small_batch = p.rows <= current_device().multiprocessors;
  if (R::kThreads == kWholeWarps)
    batch.rows_per_block = std::max(1, (is_small_batch ? kMaxThreads / 2 : kMaxThreads) / plan.threads_per_row);
  if (p.dx || p.dgate) batch.row_blocks = (batch.rows + batch.rows_per_block - 1) / batch.rows_per_block;
  const int64_t strips = p.dscale || p.dbias ? p.weight_rows.count * ((p.cols + kCols - 1) / kCols) : 0;
  if (batch.row_blocks + strips == 0) return cudaSuccess;
  // Whatever the blocks of many rows, those of few have kMaxThreads at most, but for gates.
  using SmallBatchRegime = std::conditional_t<kIsGate<EXTRA>, R, Regime<R::kThreads, R::kVectors, R::kCluster>>;
  return launch_grid(backward_small_batch_kernel<KIND, EXTRA, X, SmallBatchRegime>,
                     static_cast<unsigned>(batch.row_blocks + strips), batch.threads_per_row * batch.rows_per_block,
                     stream, batch);
}

}  // namespace jaxnorm::cuda
