// The backward of a few rows, in one kernel: some blocks compute dx of rows, as ever, the others dscale and dbias of a
// strip of columns. x and dy are read twice, but once from the cache, and there are no partial sums to add up.
#pragma once

#include "cuda/backward_row.cuh"
#include "cuda/launch.cuh"

namespace jaxnorm::cuda {

constexpr int kFewRows = 512;
constexpr int64_t kFewElements = 1 << 21;
constexpr int kStrip = 8;  // vectors, each of one thread of a row

// dscale and dbias of a head, of the columns of strip `strip`: thread i adds up every blockDim.x / kStrip-th row of its
// vector.
template <Kind KIND, typename X>
__device__ void sum_strip(const Backward& p, const HeadsLaunch& heads, int head, int strip) {
  constexpr int N = kVector<X>, kCols = kStrip * N;
  const int64_t first = int64_t{strip} * kCols + threadIdx.x % kStrip * N;
  const int left = static_cast<int>(min(int64_t{N}, p.cols - first));
  const int rows = static_cast<int>(heads.count.quotient(p.rows));
  float sums[2][N] = {};  // of dscale and of dbias
#pragma unroll 4
  for (int index = threadIdx.x / kStrip; index < rows; index += blockDim.x / kStrip) {
    const int64_t row = heads.row_of(head, index);
    RowStatistics s;
    s.template fetch<KIND>(p, row);
    float x[N], dy[N];
    unpack(load<true, N>(static_cast<const X*>(p.x.data) + row * p.cols + first, left), x);
    unpack(load<true, N>(static_cast<const X*>(p.dy.data) + row * (p.cols + p.dy_pad) + first, left), dy);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sums[0][i] = fmaf(dy[i], s.template x_hat<KIND>(x[i]), sums[0][i]);
      sums[1][i] += dy[i];
    }
  }

  __shared__ float of_warps[2][kMaxThreads / kWarp][kCols];
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int distance = kStrip; distance < kWarp; distance *= 2)
        sums[k][i] += __shfl_xor_sync(0xffffffffu, sums[k][i], distance);
      if (lane() < kStrip) of_warps[k][threadIdx.x / kWarp][lane() * N + i] = sums[k][i];
    }
  __syncthreads();
  const int k = threadIdx.x / kCols, col = threadIdx.x % kCols;
  const Output& to = k == 0 ? p.dscale : p.dbias;
  if (k > 1 || !to.data || int64_t{strip} * kCols + col >= p.cols) return;
  float sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) sum += of_warps[k][warp][col];
  store_float(to, head * p.cols + int64_t{strip} * kCols + col, sum);
}

template <Kind KIND, typename X, typename R>
__global__ void __launch_bounds__(kMaxThreads, 2)
    backward_few_kernel(const __grid_constant__ Backward p, const __grid_constant__ RowsLaunch launch,
                        unsigned row_blocks) {
  if (blockIdx.x >= row_blocks) {
    const int strip = static_cast<int>(blockIdx.x - row_blocks), heads = static_cast<int>(p.heads.count);
    return sum_strip<KIND, X>(p, launch.heads, strip % heads, strip / heads);
  }
  using W = Walk<X, R, Access::vectors>;
  Team<R::kThreads, RowSums<KIND>, 1> team(launch.threads_per_row, p.cols, launch.span, launch.reciprocal_cols);
  const int64_t row = int64_t{blockIdx.x} * launch.rows_per_block + team.place;
  if (row >= p.rows) return;
  Operands<X, X, W> operands;
  operands.x.read(team, static_cast<const X*>(p.x.data) + row * p.cols);
  operands.dy.read(team, static_cast<const X*>(p.dy.data) + row * (p.cols + p.dy_pad));
  RowStatistics s;
  s.template fetch<KIND>(p, row);
  FloatWeight<W> scale(team, from(p.scale, launch.heads.of_row(row) * p.cols));
  scale.arrive(p.scale_offset, 1.0f);
  NoSums none;
  team.publish(warp_sums<KIND, W>(team, s, operands, scale, none, none));
  const MemoryAdded<X, W> added{p.dsum.data ? static_cast<const X*>(p.dsum.data) + row * p.cols : nullptr};
  const DxResult<W, X, MemoryAdded<X, W>> result{added, static_cast<X*>(p.dx.data) + row * p.cols};
  store_dx<KIND, W>(team, s, team.collect(), operands, scale, result);
}

inline bool is_few(const Backward& p, const Plan& plan) {
  return p.rows > 0 && p.rows <= kFewRows && p.rows * p.cols <= kFewElements && plan.blocks_per_row == 1 &&
         plan.segments == 0;
}

template <Kind KIND, typename X, typename R>
cudaError_t launch_few(const Backward& p, const Plan& plan, cudaStream_t stream) {
  constexpr int kCols = kStrip * kVector<X>;
  const int64_t row_blocks = p.dx ? (p.rows + plan.rows_per_block - 1) / plan.rows_per_block : 0;
  const int64_t strips = p.dscale || p.dbias ? p.heads.count * ((p.cols + kCols - 1) / kCols) : 0;
  if (row_blocks + strips == 0) return cudaSuccess;
  return launch_teams(backward_few_kernel<KIND, X, R>, plan, row_blocks + strips, 0, stream, p,
                      RowsLaunch(plan, p.cols, kVector<X>, p.heads), static_cast<unsigned>(row_blocks));
}

}  // namespace jaxnorm::cuda
