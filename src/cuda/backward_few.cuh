// The backward of a few rows, in one kernel: some blocks compute dx of rows, as ever, the others dscale and dbias of a
// strip of columns. x and dy are read twice, but once from the cache, and there are no partial sums to add up.
#pragma once

#include "cuda/backward_gated_row.cuh"
#include "cuda/launch.cuh"

namespace jaxnorm::cuda {

constexpr int kFewRows = 512, kFewGatedRows = 64;  // gated: of a head
constexpr int64_t kFewElements = 1 << 21;
constexpr int kStrip = 8;  // vectors, each of one thread of a row

// What the kernel has to know, and no more: see FewRows of the forward.
struct FewBackward {
  const void *x, *dy;
  const float *mean, *rstd;
  Input scale;
  void* dx;
  const void* dsum;
  int rows, cols, dy_stride;
  float reciprocal_cols, scale_offset;
  int threads_per_row, rows_per_block;
  unsigned row_blocks = 0;
  HeadsLaunch heads;
  Output dscale, dbias;
  Gate gate;
  void* dgate;

  FewBackward(const Backward& p, const Plan& plan)
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
        heads(p.heads),
        dscale(p.dscale),
        dbias(p.dbias),
        gate(p.gate),
        dgate(p.dgate.data) {}
};

// dscale and dbias of a head, of the columns of strip `strip`: thread i adds up every blockDim.x / kStrip-th row of its
// vector.
template <Kind KIND, Third THIRD, typename X, int MOST>
__device__ void sum_strip(const FewBackward& p, int head, int strip) {
  constexpr int N = kVector<X>, kCols = kStrip * N;
  const int first = strip * kCols + static_cast<int>(threadIdx.x) % kStrip * N, left = p.cols - first;
  const int rows = static_cast<int>(p.heads.count.quotient(p.rows));
  const auto read = [&](const void* array, int64_t row_at, float (&to)[N]) {
    unpack(load<true, N>(static_cast<const X*>(array) + row_at + first, left), to);
  };
  float sums[2][N] = {};  // of dscale and of dbias
#pragma unroll 4
  for (int index = threadIdx.x / kStrip; index < rows; index += blockDim.x / kStrip) {
    const int64_t row = p.heads.row_of(head, index);
    RowStatistics s;
    s.template fetch<KIND>(p, row);
    float x[N], dy[N];
    read(p.x, row * p.cols, x);
    read(p.dy, row * p.dy_stride, dy);
    if constexpr (kIsGate<THIRD>) {
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

template <Kind KIND, Third THIRD, typename X, typename R>
__global__ void __launch_bounds__(R::kMost, kIsGate<THIRD> ? 1 : 2)
    backward_few_kernel(const __grid_constant__ FewBackward p) {
  if (blockIdx.x >= p.row_blocks) {
    const int strip = static_cast<int>(blockIdx.x - p.row_blocks), heads = static_cast<int>(p.heads.count.value);
    const int of_head = heads == 1 ? strip : strip / heads;
    return sum_strip<KIND, THIRD, X, R::kMost>(p, heads == 1 ? 0 : strip % heads, of_head);
  }
  using W = Walk<X, R, Access::vectors>;
  Team<R::kThreads, RowSums<KIND>, 1, R::kMost, R::kManyWarps> team(p.threads_per_row, p.cols, 0, p.reciprocal_cols);
  const int row = static_cast<int>(blockIdx.x) * p.rows_per_block + team.place;
  if (row >= p.rows) return;
  // Each vector's address would be computed from the array's beginning.
  const auto row_of = [&](auto* array, int stride) {
    auto* at = array + int64_t{row} * stride;
    hide(at);
    return at;
  };
  std::conditional_t<kIsGate<THIRD>, GatedOperands<X, W, THIRD>, Operands<X, X, W>> operands;
  operands.x.read(team, row_of(static_cast<const X*>(p.x), p.cols));
  operands.dy.read(team, row_of(static_cast<const X*>(p.dy), p.dy_stride));
  if constexpr (kIsGate<THIRD>) {
    operands.gate.read(team, row_of(static_cast<const X*>(p.gate.data.data), p.cols));
    operands.how = p.gate;
  }
  RowStatistics s;
  s.template fetch<KIND>(p, row);
  FloatWeight<W> scale(team, from(p.scale, p.heads.of_row(row) * p.cols));
  scale.arrive(p.scale_offset, 1.0f);
  NoSums none;
  team.publish(warp_sums<KIND, W>(team, s, operands, scale, none, none));
  const auto store = [&](const auto& result) { store_dx<KIND, W>(team, s, team.collect(), operands, scale, result); };
  const auto result_row = [&](void* array) { return array ? row_of(static_cast<X*>(array), p.cols) : nullptr; };
  if constexpr (kIsGate<THIRD>) {
    store(GatedResult<W, X>(result_row(p.dx), result_row(p.dgate)));
  } else {
    const MemoryAdded<X, W> added{p.dsum ? row_of(static_cast<const X*>(p.dsum), p.cols) : nullptr};
    store(DxResult<W, X, MemoryAdded<X, W>>{added, result_row(p.dx)});
  }
}

inline bool is_few(const Backward& p, const Plan& plan) {
  // With a gate strips have much to compute, and not many threads to do it.
  const int64_t most_rows = p.gate ? kFewGatedRows * p.heads.count : kFewRows;
  const int64_t most_elements = p.gate ? kFewElements / 4 : kFewElements;
  return p.rows > 0 && p.rows <= most_rows && p.rows * (p.cols + p.dy_pad) <= most_elements &&
         p.rows % p.heads.count == 0 && plan.blocks_per_row == 1 && plan.segments == 0;
}

template <Kind KIND, Third THIRD, typename X, typename R>
cudaError_t launch_few(const Backward& p, const Plan& plan, cudaStream_t stream) {
  constexpr int kCols = kStrip * kVector<X>;
  FewBackward few(p, plan);
  // Where there are more multiprocessors than rows, blocks have few rows.
  const bool are_few = p.rows <= current_device().multiprocessors;
  if (R::kThreads == kWholeWarps)
    few.rows_per_block = std::max(1, (are_few ? kMaxThreads / 2 : kMaxThreads) / plan.threads_per_row);
  if (p.dx || p.dgate) few.row_blocks = (few.rows + few.rows_per_block - 1) / few.rows_per_block;
  const int64_t strips = p.dscale || p.dbias ? p.heads.count * ((p.cols + kCols - 1) / kCols) : 0;
  if (few.row_blocks + strips == 0) return cudaSuccess;
  // Whatever the blocks of many rows, those of few have kMaxThreads at most, but for gates.
  using Few = std::conditional_t<kIsGate<THIRD>, R, Regime<R::kThreads, R::kVectors, R::kCluster>>;
  return launch_grid(backward_few_kernel<KIND, THIRD, X, Few>, static_cast<unsigned>(few.row_blocks + strips),
                     few.threads_per_row * few.rows_per_block, stream, few);
}

}  // namespace jaxnorm::cuda
