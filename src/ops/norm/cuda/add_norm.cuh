// The forward of x + addend in one kernel, where what models have is known to the compiler: y is of x's type, which
// is the addend's or, of an f32 addend, a half type; RMSNorm without a bias, LayerNorm rounded once.
#pragma once

#include "ops/norm/cuda/norm.cuh"

namespace jaxnorm::cuda {

// A call with known weights in a regime.
template <typename STATS, typename S, typename X, typename R, typename W>
cudaError_t launch_add_norm(const AddNormForward& p, const Plan& plan, cudaStream_t stream) {
  constexpr int N = kVector<S>, kLarger = kVector<X> > N ? kVector<X> : N;
  RowsLaunch launch(plan, p.cols, N, p.weight_rows);
  launch.own.y_pad = p.y_stride - p.cols;
  const bool is_aligned =
      p.cols % kLarger == 0 && p.y_stride % kLarger == 0 && are_aligned<N>(p.x, p.addend, p.y, p.sum, p.scale, p.bias);
  if constexpr (R::kCluster == 1) {
    if (!is_aligned) return cudaErrorNotSupported;
    return RowLauncher<NormOp<STATS, S, X, W, true>, R>{p, plan, launch, stream}.template direct<Access::vectors>();
  } else {
    // What comes by way of a pipeline is copied in bulk, and so aligned to 16 bytes.
    if (!is_aligned || !are_aligned<kVector<X>>(p.x)) return cudaErrorNotSupported;
    using Op = NormOp<STATS, S, X, typename W::template Floats<S>, true>;
    return RowLauncher<Op, R>{p, plan, launch, stream}.template pipelined<Access::pipelined>(p.workspace);
  }
}

template <typename S, typename X>
cudaError_t add_norm_as(const AddNormForward& p, const Plan& plan, cudaStream_t stream) {
  return with_stats(p.kind, [&](auto stats) {
    using STATS = decltype(stats);
    return with_regime<ForwardRegimes<sizeof(S)>>(plan, [&](auto regime) {
      using R = decltype(regime);
      if constexpr (R::kVectors == kStreamed) {
        return cudaErrorNotSupported;
      } else {
        return with_weights<STATS, X>(p, p.y.dtype, p.multiply_before_cast, [&](auto weights) {
          using W = decltype(weights);
          if constexpr (kIsKnown<W>) return launch_add_norm<STATS, S, X, R, W>(p, plan, stream);
          return cudaErrorNotSupported;
        });
      }
    });
  });
}

// branch_scale * x + addend, rounded to the addend's type S. branch_scale is of T and has a row for each row that is
// under way; where it is absent all of it is 1.
template <typename X, typename S, typename T, typename Tile>
struct LoadScaledSum {
  using Fragment = SumRow<X, S, Tile>;

  template <typename P, typename Group, typename Batch>
  __device__ static void read(const P& p, const Group& group, Batch& rows) {
#pragma unroll
    for (int r = 0; r < Batch::kRows; ++r) {
      const int64_t row = rows.row_to_read(r), start = row * p.cols;
      const X* x = static_cast<const X*>(p.x.data) + start;
      hide(x);
      const PackedWeight<T, Tile, Place::memory> weight(group,
                                                        from(p.branch_scale, p.factor_rows.of_row(row) * p.cols));
      rows.x[r].read(group, x, static_cast<const S*>(p.addend.data) + start, static_cast<S*>(p.sum.data) + start,
                     p.sum.data && rows.is_there(r),
                     [&](int vec, auto col, int remaining, const auto& a, const auto& b) {
                       float factor[Tile::N] = {};
                       if (p.branch_scale.data) weight.get(vec, col, remaining, factor);
                       complete(p.branch_scale.data, kNothing, 1.0f, factor);
                       return scaled_sum_of(factor, a, b);
                     });
    }
  }
};

struct ScaledAddNormCall : ScaledAddNormForward {
  RowMapLaunch factor_rows;
  explicit ScaledAddNormCall(const ScaledAddNormForward& p) : ScaledAddNormForward(p), factor_rows(p.weight_rows) {}
};

// All weights of T, with rows of their own or one for all, and y rounded once and not padded: LayerScale, adaLN-Zero
// and what is like them.
template <typename STATS, typename S, typename X, typename T>
struct ScaledAddNormOp : RowOp<S, STATS, 2> {
  using Params = ScaledAddNormCall;
  using Known = Weights<T, STATS::kCentred, false, true>;
  using Y = X;
  static constexpr bool kPads = false;
  template <typename Tile>
  using Load = LoadScaledSum<X, S, T, Tile>;
  template <typename R, typename Tile>
  using Epilogue = AffineEpilogue<ScaledAddNormOp, R, Tile>;
};

template <typename STATS, typename S, typename X, typename T>
cudaError_t launch_scaled_add_norm(const ScaledAddNormForward& p, const Plan& plan, cudaStream_t stream) {
  return with_regime<ForwardRegimes<sizeof(S)>>(plan, [&](auto regime) {
    using R = decltype(regime);
    if constexpr (R::kVectors == kStreamed || R::kCluster > 1) {
      return cudaErrorNotSupported;
    } else {
      RowsLaunch launch(plan, p.cols, kVector<S>, p.weight_rows);
      const ScaledAddNormCall call(p);
      return RowLauncher<ScaledAddNormOp<STATS, S, X, T>, R>{call, plan, launch, stream}
          .template direct<Access::vectors>();
    }
  });
}

template <typename S, typename X>
cudaError_t scaled_add_norm_as(const ScaledAddNormForward& p, const Plan& plan, cudaStream_t stream) {
  constexpr int N = kVector<S>, kLarger = kVector<X> > N ? kVector<X> : N;
  return with_stats(p.kind, [&](auto stats) {
    using STATS = decltype(stats);
    const auto all_are = [&](Dtype dtype) {
      return (!p.branch_scale || p.branch_scale.dtype == dtype) && p.scale.dtype == dtype &&
             (!STATS::kCentred || p.bias.dtype == dtype);
    };
    const bool is_known = p.scale && bool{p.bias} == STATS::kCentred && p.y.dtype == kDtype<X> &&
                          p.y_stride == p.cols && (p.multiply_before_cast || sizeof(X) == 4);
    const bool is_aligned =
        p.cols % kLarger == 0 && are_aligned<N>(p.x, p.addend, p.y, p.sum, p.scale, p.bias, p.branch_scale);
    if (!is_known || !is_aligned) return cudaErrorNotSupported;
    if (all_are(Dtype::f32)) return launch_scaled_add_norm<STATS, S, X, float>(p, plan, stream);
    if constexpr (sizeof(X) < 4)
      if (all_are(kDtype<X>)) return launch_scaled_add_norm<STATS, S, X, X>(p, plan, stream);
    return cudaErrorNotSupported;
  });
}

// Calls f with the type of x beside an addend of S.
template <typename S, typename F>
cudaError_t with_x_type(Dtype x, F f) {
  if (x == kDtype<S>) return f(S{});
  if constexpr (std::is_same_v<S, float>) {
    return x == Dtype::f16 ? f(__half{}) : f(__nv_bfloat16{});
  } else {
    return cudaErrorNotSupported;
  }
}

template <typename S>
cudaError_t run_scaled_add_norm(const ScaledAddNormForward& p, const Plan& plan, cudaStream_t stream) {
  return with_x_type<S>(p.x.dtype, [&](auto x) { return scaled_add_norm_as<S, decltype(x)>(p, plan, stream); });
}

template <typename S>
cudaError_t run_add_norm(const AddNormForward& p, const Plan& plan, cudaStream_t stream) {
  return with_x_type<S>(p.x.dtype, [&](auto x) { return add_norm_as<S, decltype(x)>(p, plan, stream); });
}

}  // namespace jaxnorm::cuda
