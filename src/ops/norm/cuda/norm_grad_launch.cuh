// Which kernel computes the gradients of a call of RMSNorm or LayerNorm.
#pragma once

#include "ops/norm/cuda/grad_columns.cuh"
#include "ops/norm/cuda/grad_row.cuh"
#include "ops/norm/cuda/grad_small_batch.cuh"

namespace jaxnorm::cuda {

// What is rare has no pipelines, for kernels take time to compile: half types whose dy is f32. Rows that vectors do not
// divide go the slow way if x and dy differ in type. `kWeights`: what is rare has one kernel for all gradients.
template <Kind KIND, typename X_, typename DY_>
struct NormWays {
  using X = X_;
  using DY = DY_;
  static constexpr bool kOneType = std::is_same_v<X, DY>, kPipelines = kOneType || sizeof(X) == 4;
  static constexpr int kWeights = KIND == Kind::layer || !kOneType ? 2 : 1;
  template <bool IF, Extra DSUM>
  using OpIf = std::conditional_t<IF, NormGrad<KIND, X, DY, kWeights, DSUM>, void>;

  using Pipelined = OpIf<kPipelines, Extra::absent>;
  using PipelinedExtra = OpIf<kPipelines, Extra::pipelined>;
  using PipelinedScalar = OpIf<kOneType, Extra::in_memory>;
  using Vectors = OpIf<true, Extra::in_memory>;
  using Scalar = OpIf<kOneType, Extra::in_memory>;
  // What is rarest, one for all types of dy and, where vectors past a row's end add zeros, all numbers of vectors.
  using Elementwise = NormGrad<KIND, X, AnyElement, 2, Extra::in_memory>;
  static constexpr int kMost = kElements / kVector<X>;
  template <typename R>
  using ElementwiseRegime =
      Regime<R::kThreads, R::kThreads == kWholeWarps || R::kThreads == kWholeBlock ? R::kVectors : kMost, R::kCluster,
             R::kMost>;
};

constexpr SmallBatchLimits kSmallNormBatch{512, 1 << 21};

template <Kind KIND, typename X, typename DY>
cudaError_t launch_norm_grad(const NormBackward& p, cudaStream_t stream);

// RMSNorm has seldom a bias. Its gradient is LayerNorm's, a sum of dy alone, by the kernel of which no mean is seen in
// it; what else is wanted comes first, with the bits that it has without one.
template <typename X>
cudaError_t launch_with_dbias(const NormBackward& p, cudaStream_t stream) {
  NormBackward others = p, sum = p;
  others.dbias = sum.dx = sum.dscale = Output{};
  sum.dsum = Input{};
  sum.mean = p.rstd;
  const cudaError_t error = launch_norm_grad<Kind::rms, X, X>(others, stream);
  return error == cudaSuccess ? launch_norm_grad<Kind::layer, X, X>(sum, stream) : error;
}

template <Kind KIND, typename X, typename DY>
cudaError_t launch_norm_grad(const NormBackward& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  Plan plan = make_backward_plan(kDtype<X>, p.cols, current_device().max_cluster());
  if (p.dsum) plan = beside_extra_operand(plan);
  // Rows of dy as well are whole multiples of 16 bytes: they may be copied in bulk.
  const bool aligned = p.cols % N == 0 && p.cols % kVector<DY> == 0 && p.dy_stride % kVector<DY> == 0 &&
                       are_aligned<N>(p.x, p.dx, p.scale, p.dsum, Output{p.workspace.data, Dtype::f32}) &&
                       are_aligned<kVector<DY>>(p.dy);
  const GradCall<NormState> call{
      p.rows, p.cols, p.dy, p.x, p.scale, p.dsum, {p.mean, p.rstd}, p.dx, p.scale_offset, p.dy_stride - p.cols};
  if constexpr (std::is_same_v<X, DY>)
    if (aligned && is_small_batch(call, plan, p.weight_rows, kSmallNormBatch))
      return launch_small_batch<NormGrad<KIND, X, X, 2, Extra::in_memory>>(grad_regimes<X>(), call, plan, p.weight_rows,
                                                                           p.dscale, p.dbias, stream);
  if (!p.dx && !p.dscale && !p.dbias) return cudaSuccess;
  const bool by_columns = plan.segments > 0;
  if (by_columns && p.weight_rows.count > 1) return cudaErrorInvalidValue;
  if constexpr (KIND == Kind::rms && std::is_same_v<X, DY>)
    if (!by_columns && p.dbias) return launch_with_dbias<X>(p, stream);

  GradRoom room;
  const GradNeeds needs{bool{p.dscale}, bool{p.dbias}, p.dx ? plan.segments : 0};
  cudaError_t error = make_room(p.workspace, needs, plan, kDtype<X>, p.rows, p.cols, p.weight_rows, room);
  // Fewer than the schedule allows: so many blocks of the kernel by columns run at once.
  if (by_columns && aligned)
    room.partials.rows = std::min(room.partials.rows, rows_of_column_blocks(kDtype<X>, p.cols));
  if (error == cudaSuccess && p.rows > 0)
    error = by_columns ? launch_columns<NormGrad<KIND, X, DY, 2, Extra::in_memory>>(call, room, aligned, stream)
                       : launch_grad_rows<NormWays<KIND, X, DY>>(grad_regimes<X>(), call, plan, p.weight_rows, room,
                                                                 aligned, stream);
  if (error != cudaSuccess || !(p.dscale || p.dbias)) return error;
  return sum_partials(room.partials, p.weight_rows.count * p.cols, p.dscale, p.dbias, stream);
}

template <Kind KIND, typename X>
cudaError_t norm_grad_of_kind(const NormBackward& p, cudaStream_t stream) {
  if (p.dy.dtype == kDtype<X>) return launch_norm_grad<KIND, X, X>(p, stream);
  if constexpr (std::is_same_v<X, float>) {
    return p.dy.dtype == Dtype::f16 ? launch_norm_grad<KIND, X, __half>(p, stream)
                                    : launch_norm_grad<KIND, X, __nv_bfloat16>(p, stream);
  } else {
    return launch_norm_grad<KIND, X, float>(p, stream);
  }
}

template <typename X>
cudaError_t norm_grad_of(const NormBackward& p, cudaStream_t stream) {
  return p.kind == Kind::rms ? norm_grad_of_kind<Kind::rms, X>(p, stream)
                             : norm_grad_of_kind<Kind::layer, X>(p, stream);
}

}  // namespace jaxnorm::cuda
