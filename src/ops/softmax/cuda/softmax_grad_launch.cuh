// Which kernel computes the gradients of a call of softmax or log-softmax.
#pragma once

#include "ops/softmax/cuda.h"
#include "ops/softmax/cuda/regimes.h"
#include "ops/softmax/cuda/softmax_grad.cuh"

namespace jaxnorm::cuda {

// By which access a call goes in a regime. What is rare has no pipelines, and goes by elements where it is not aligned:
// by the kernel for masked rows, which adds up in the same order.
template <typename Op, typename R>
cudaError_t launch_rows(const RowLauncher<Op, R>& rows, bool is_aligned, bool is_divided) {
  constexpr bool kUsual = !Op::Mask::kMasks && Op::kOneType, kHalf = sizeof(typename Op::Stream) == 2;
  if constexpr (kUsual && R::kVectors != kStreamed) {
    if constexpr (R::kCluster > 1) {
      cudaError_t error = cudaErrorNotSupported;
      if (is_aligned) error = rows.template pipelined<Access::pipelined>({});
      // Elements take a register each: there is room for so many.
      if constexpr (R::kVectors * kVector<typename Op::Stream> <= 32)
        if (!is_divided) error = rows.template pipelined<Access::pipelined_scalar>({});
      if (error != cudaErrorNotSupported) return error;
    } else if constexpr (kHalf) {
      if (!is_aligned) return rows.template direct<Access::unaligned>();
    } else {
      if (!is_divided) return rows.template direct<Access::scalar>();
    }
  }
  if (is_aligned) return rows.template direct<Access::vectors>();
  using Any = std::conditional_t<Op::Mask::kMasks, Op, SoftmaxGradOp<typename Op::Dx, typename Op::Element, RowMask>>;
  if constexpr (!kUsual || R::kVectors == kStreamed || R::kCluster > 1 || !kHalf)
    return RowLauncher<Any, R>{rows.p, rows.plan, rows.launch, rows.stream}.template direct<Access::elementwise>();
  return cudaErrorInvalidValue;  // not reached: it went by unaligned vectors
}

template <typename Op>
cudaError_t launch_softmax_grad(const SoftmaxGradCall& p, const Mask& mask, cudaStream_t stream) {
  constexpr int N = kVector<typename Op::Stream>;
  constexpr Dtype kStream = kDtype<typename Op::Stream>;
  constexpr bool kHasWindow = Op::Mask::kHasWindow;
  using Regimes = std::conditional_t<kHasWindow, WindowRegimes, PairRegimes<size_of(kStream)>>;
  const Plan plan =
      kHasWindow ? make_window_plan(kStream, p.cols) : make_pair_plan(kStream, p.cols, current_device().max_cluster());
  const bool is_divided = p.cols % N == 0;
  const bool is_aligned = is_divided && are_aligned<N>(p.dy, p.second, p.dx) && is_aligned_for<N>(mask);
  return with_regime<Regimes>(plan, [&](auto regime) {
    RowsLaunch launch(plan, p.cols, N, {});
    return launch_rows(RowLauncher<Op, decltype(regime)>{p, plan, launch, stream}, is_aligned, is_divided);
  });
}

template <typename Dx, typename T>
cudaError_t softmax_grad_as(const SoftmaxGradCall& p, const Mask& mask, cudaStream_t stream) {
  if (mask.starts) return launch_softmax_grad<SoftmaxGradOp<Dx, T, WindowMask>>(p, mask, stream);
  if constexpr (!std::is_same_v<T, AnyElement>)
    if (!mask) return launch_softmax_grad<SoftmaxGradOp<Dx, T, NoMask>>(p, mask, stream);
  return launch_softmax_grad<SoftmaxGradOp<Dx, T, RowMask>>(p, mask, stream);
}

template <typename T>
cudaError_t softmax_grad_of(const SoftmaxBackward& p, cudaStream_t stream) {
  return softmax_grad_as<SoftmaxDx, T>({p.rows, p.cols, p.dy, p.y, nullptr, nullptr, p.dx, p.scale, MaskLaunch(p.mask)},
                                       p.mask, stream);
}

template <typename T>
cudaError_t log_softmax_grad_of(const LogSoftmaxBackward& p, cudaStream_t stream) {
  return softmax_grad_as<LogSoftmaxDx, T>(
      {p.rows, p.cols, p.dy, p.x, p.log_sum, p.top, p.dx, p.scale, MaskLaunch(p.mask)}, p.mask, stream);
}

}  // namespace jaxnorm::cuda
