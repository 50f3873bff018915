// The forward of the sandwich norm in one kernel, where what models have is known to the compiler: x, the addend and
// y of one type, both scales, of that type or of f32, and rows that one block holds. A row is read once: x is in
// registers until it is normalised and added, and the sum in the addend's.
#pragma once

#include "ops/norm/cuda/affine.cuh"
#include "ops/sandwich_norm/call.h"
#include "ops/shared/cuda/stats.cuh"

namespace jaxnorm::cuda {

// A row in registers.
template <typename X, typename Tile>
struct PackedRow {
  Packed<X, Tile::N> packed[Tile::VECTORS];

  template <typename Group>
  __device__ void read(const Group& group, const X* row) {
    for_each_vector<Tile>(
        group, [&](int vec, auto col, int remaining) { packed[vec] = load_now<Tile::N>(row + col, remaining); });
  }

  __device__ void get(int vec, int64_t, int, float (&to)[Tile::N]) const { unpack(packed[vec], to); }
};

// addend + rms_norm(x, post_scale), rounded after each: the first norm is a matter of how the second's rows come.
template <typename X, typename T, typename Tile>
struct LoadNormedSum {
  using Fragment = PackedRow<X, Tile>;

  template <typename P, typename Group, typename Batch>
  __device__ static void read(const P& p, Group& group, Batch& rows) {
    constexpr int kRegisters = Tile::VECTORS * Tile::N * static_cast<int>(2 * Batch::kRows * sizeof(X) + sizeof(T)) / 4;
    constexpr Place kPlace = sizeof(T) == sizeof(X) && kRegisters <= 48 ? Place::registers : Place::memory;
    Fragment x[Batch::kRows];
#pragma unroll
    for (int r = 0; r < Batch::kRows; ++r) {
      const int64_t start = rows.row_to_read(r) * p.cols;
      const X* x_row = static_cast<const X*>(p.x.data) + start;
      hide(x_row);
      x[r].read(group, x_row);
      rows.x[r].read(group, static_cast<const X*>(p.addend.data) + start);
    }
    const PackedWeight<T, Tile, kPlace> post_scale(group, p.post_scale);
    const float cols = warp_cols<Tile>(group);
#pragma unroll
    for (int r = 0; r < Batch::kRows; ++r) {
      group.publish(MeanSquare::warp_part<Tile>(x[r], group, cols));
      const auto s = MeanSquare::finish(p, group.collect(), group.reciprocal());
      if (p.post_rstd && group.rank == 0 && rows.is_there(r)) p.post_rstd[rows.row(r)] = s.rstd;
      X* const sum = static_cast<X*>(p.sum.data) + rows.row(r) * p.cols;
      for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
        if (remaining <= 0) return;  // x_hat of what is past the row's end may be infinite
        float factor[Tile::N], values[Tile::N];
        post_scale.get(vec, col, remaining, factor);
        complete(true, p.scale_offset, 1.0f, factor);
        x[r].get(vec, col, remaining, values);
        to_result<X, Weights<T, false, false>>(s, factor, factor, values);
        Packed<X, Tile::N>& total = rows.x[r].packed[vec];
        total = sum_of(pack<X>(values), total);
        if (rows.is_there(r)) store<true>(sum + col, total, remaining);
      });
    }
  }
};

template <typename X, typename T>
struct SandwichNormOp : RowOp<X, MeanSquare, 2> {
  using Params = SandwichNormForward;
  using Known = Weights<T, false, false>;
  using Y = X;
  static constexpr bool kPads = false;
  template <typename Tile>
  using Load = LoadNormedSum<X, T, Tile>;
  template <typename R, typename Tile>
  using Epilogue = AffineEpilogue<SandwichNormOp, R, Tile>;

  // A scale is beside the rows of two arrays: with fewer registers they spill.
  template <typename R, Access ACCESS>
  static constexpr int kRegisters = R::kVectors == 8                      ? 128
                                    : R::kVectors == 4 && R::kThreads > 0 ? 96
                                                                          : R::kRegisters.weights;
};

template <typename X, typename T>
cudaError_t sandwich_norm_as(const SandwichNormForward& p, const Plan& plan, cudaStream_t stream) {
  return with_regime<ForwardRegimes<sizeof(X)>>(plan, [&](auto regime) {
    using R = decltype(regime);
    if constexpr (R::kVectors == kStreamed || R::kCluster > 1) {
      return cudaErrorNotSupported;
    } else {
      RowsLaunch launch(plan, p.cols, kVector<X>, {});
      return RowLauncher<SandwichNormOp<X, T>, R>{p, plan, launch, stream}.template direct<Access::vectors>();
    }
  });
}

template <typename X>
cudaError_t run_sandwich_norm(const SandwichNormForward& p, const Plan& plan, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.x, p.addend, p.post_scale, p.scale, p.y, p.sum);
  const bool is_known = p.sum.dtype == kDtype<X> && p.post_scale && p.scale && p.post_scale.dtype == p.scale.dtype &&
                        (p.multiply_before_cast || sizeof(X) == 4);
  if (!is_aligned || !is_known) return cudaErrorNotSupported;
  if (p.scale.dtype == kDtype<X>) return sandwich_norm_as<X, X>(p, plan, stream);
  if constexpr (sizeof(X) < 4)
    if (p.scale.dtype == Dtype::f32) return sandwich_norm_as<X, float>(p, plan, stream);
  return cudaErrorNotSupported;
}

}  // namespace jaxnorm::cuda
