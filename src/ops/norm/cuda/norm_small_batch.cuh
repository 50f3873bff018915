// The forward of a small batch, with too few rows for every multiprocessor to have one: a block for each vector of a
// thread. Each sums up the whole row, in the order of the kernel for many rows and so to the same bits, and finishes
// its part of it. The row is read several times, but once from memory.
#pragma once

#include "ops/norm/cuda/affine.cuh"

namespace jaxnorm::cuda {

// All that the kernel has to know. With every argument of a forward and of a launch it would take a tenth of a
// microsecond longer.
struct SmallBatch {
  const void *x, *scale;
  struct {
    const void* data;
  } bias;
  void* y;
  float *mean, *rstd;
  int cols;
  float reciprocal_cols, epsilon, scale_offset;
  bool multiply_before_cast;
};

// Block (vec, row) finishes the vectors with this number of all threads.
template <typename STATS, typename X, typename R, typename W>
__global__ void __launch_bounds__(R::kMost) norm_small_batch_kernel(const __grid_constant__ SmallBatch p) {
  using Tile = Tiling<X, R, Access::vectors>;
  using T = typename W::Element;
  constexpr int N = Tile::N;
  ThreadGroup<kWholeBlock, typename STATS::Part, 1> group(0, p.cols, 0, p.reciprocal_cols);
  const int row = static_cast<int>(blockIdx.y), vec = static_cast<int>(blockIdx.x);
  const int col = first_of_thread<Tile>(group) + vec * Tile::STRIDE, remaining = p.cols - col;
  const X* x_row = static_cast<const X*>(p.x) + int64_t{row} * p.cols;
  hide(x_row);
  Row<X, Tile> x;
  x.read(group, x_row);
  // x has it, but in registers that are known by number.
  const Packed<X, N> own = load_now<N>(x_row + col, remaining);
  const Packed<T, N> scale = load_now<N>(static_cast<const T*>(p.scale) + col, remaining);
  Packed<T, N> bias{};
  if constexpr (W::kBias) bias = load_now<N>(static_cast<const T*>(p.bias.data) + col, p.bias.data ? remaining : 0);

  group.publish(STATS::template warp_part<Tile>(x, group, warp_cols<Tile>(group)));
  const auto s = STATS::finish(p, group.collect(), p.reciprocal_cols);
  if (vec == 0 && group.rank == 0) STATS::write(p, s, row);
  float values[N], factor[N], term[N];
  unpack(own, values);
  unpack(scale, factor);
  if constexpr (W::kBias) unpack(bias, term);
  complete(true, p.scale_offset, 1.0f, factor);
  with_choice<X, W>(p, [&](auto choice) { to_result<X, decltype(choice)>(s, factor, term, values); });
  store<true>(static_cast<X*>(p.y) + int64_t{row} * p.cols + col, pack<X>(values), remaining);
}

// Whether there is a multiprocessor for each of their blocks.
template <typename R>
bool is_small_batch(const NormForward& p) {
  return p.rows * R::kVectors <= current_device().multiprocessors;
}

template <typename STATS, typename X, typename R, typename W>
cudaError_t launch_small_batch(const NormForward& p, const Plan& plan, const RowsLaunch& launch, cudaStream_t stream) {
  const SmallBatch batch{p.x.data,
                         p.scale.data,
                         {p.bias.data},
                         p.y.data,
                         p.mean,
                         p.rstd,
                         static_cast<int>(p.cols),
                         launch.reciprocal_cols,
                         p.epsilon,
                         p.scale_offset,
                         p.multiply_before_cast};
  return launch_grid(norm_small_batch_kernel<STATS, X, R, W>, dim3(R::kVectors, static_cast<unsigned>(p.rows)),
                     plan.block_threads(), stream, batch);
}

}  // namespace jaxnorm::cuda
