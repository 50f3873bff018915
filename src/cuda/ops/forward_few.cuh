// The forward of a few rows, too few for every multiprocessor to have one: a block for each vector of a thread. Each
// sums up the whole row, in the order of the kernel for many rows and so to the same bits, and finishes its part of it.
// The row is read several times, but once from memory.
#pragma once

#include "cuda/engine/launch.cuh"
#include "cuda/ops/forward_row.cuh"

namespace jaxnorm::cuda {

// All that the kernel has to know. With every argument of a forward and of a launch it would take a tenth of a
// microsecond longer.
struct SmallBatch {
  const void *x, *scale, *bias;
  void* y;
  float *mean, *rstd;
  int cols;
  float reciprocal_cols, epsilon, scale_offset;
};

// Block (slot, row) finishes the vectors of this slot.
template <Kind KIND, typename X, typename R, typename C>
__global__ void __launch_bounds__(R::kMost) forward_small_batch_kernel(const __grid_constant__ SmallBatch p) {
  using Tile = Tiling<X, R, Access::vectors>;
  using T = typename C::Weight;
  constexpr int N = Tile::N;
  ThreadGroup<kWholeBlock, Part<KIND>, 1> group(0, p.cols, 0, p.reciprocal_cols);
  const int row = static_cast<int>(blockIdx.y), slot = static_cast<int>(blockIdx.x);
  const int first = first_of_thread<Tile>(group) + slot * Tile::STRIDE, left = p.cols - first;
  const X* x_row = static_cast<const X*>(p.x) + int64_t{row} * p.cols;
  hide(x_row);
  Row<X, Tile> x;
  x.read(group, x_row);
  const Packed<X, N> own = load_now<N>(x_row + first, left);  // x has it, but in registers that are known by number
  const Packed<T, N> scale = load_now<N>(static_cast<const T*>(p.scale) + first, left);
  Packed<T, N> bias;
  if constexpr (C::kBias) bias = load_now<N>(static_cast<const T*>(p.bias) + first, left);

  group.publish(warp_part<KIND, Tile>(x, group, warp_cols<Tile>(group)));
  const Statistics s = statistics<KIND>(group.collect(), p.reciprocal_cols, p.epsilon);
  if (slot == 0 && group.rank == 0) write_statistics<KIND>(s, row, p.mean, p.rstd);
  float values[N], factor[N], term[N];
  unpack(own, values);
  unpack(scale, factor);
  if constexpr (C::kBias) unpack(bias, term);
#pragma unroll
  for (int i = 0; i < N; ++i) factor[i] += p.scale_offset;
  finish<KIND, X, C>(s, factor, term, values);
  store<true>(static_cast<X*>(p.y) + int64_t{row} * p.cols + first, pack<X>(values), left);
}

template <typename R, typename C>
constexpr bool kMayBeSmallBatch =
    C::kSpecialised && !C::kAdds && !C::kPerHead && R::kThreads == kWholeBlock && R::kCluster == 1;

// Whether there is a multiprocessor for each of their blocks.
template <typename R>
bool is_small_batch(const Forward& p) {
  return p.rows * R::kVectors <= current_device().multiprocessors;
}

template <Kind KIND, typename X, typename R, typename C>
cudaError_t launch_small_batch(const Forward& p, const Plan& plan, const RowsLaunch& launch, cudaStream_t stream) {
  const SmallBatch rows{
      p.x.data,  p.scale.data,  p.bias.data, p.y.data, p.mean, p.rstd, static_cast<int>(p.cols), launch.reciprocal_cols,
      p.epsilon, p.scale_offset};
  return launch_grid(forward_small_batch_kernel<KIND, X, R, C>, dim3(R::kVectors, static_cast<unsigned>(p.rows)),
                     plan.block_threads(), stream, rows);
}

}  // namespace jaxnorm::cuda
