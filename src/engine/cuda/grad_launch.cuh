// From a call of a gradient to the kernel of its loop over rows.
//
// Rows are reached in the first of these ways that there is a kernel for and that the arrays and the device's shared
// memory allow. Ways names the functor of each, void where no kernel goes that way:
//
//   PipelinedExtra, Pipelined   aligned arrays, with an extra operand that comes by way of pipelines and without one
//   PipelinedScalar             rows that vectors do not divide; of one block's only if there is Pipelined
//   Vectors, Scalar             the same without pipelines, where one block has a row; there is always Vectors
//   Elementwise                 any array, in vectors that are read element by element; there always is one, for rows
//                               of ElementwiseRegime<R>
//
// X and DY of Ways are the types of x and dy.
#pragma once

#include "engine/cuda/grad_loop.cuh"
#include "engine/cuda/grad_regimes.cuh"
#include "engine/cuda/grad_schedule.h"

namespace jaxnorm::cuda {

template <typename Ways, typename State>
class GradLaunch {
  using X = typename Ways::X;

 public:
  // `aligned`: whether all arrays are aligned to vectors, which divide their rows.
  GradLaunch(const GradCall<State>& p, const Plan& plan, const RowMap& weight_rows, const GradRoom& room, bool aligned,
             cudaStream_t stream)
      : p_(p),
        plan_(plan),
        room_(room),
        aligned_(aligned),
        divided_(p.cols % kVector<X> == 0 && p.cols % kVector<typename Ways::DY> == 0),
        stream_(stream),
        launch_(plan, p.cols, kVector<X>, weight_rows) {
    launch_.set_grid_stride(room.schedule.stride, room.schedule.end);
    launch_.own.sums = room.schedule.sums;
  }

  template <typename R>
  cudaError_t run(R) {
    // Blocks that are no clusters have no registers for pipelines beside more elements a thread, and larger blocks are
    // of rows that vectors divide.
    constexpr bool kPipelines = R::kCluster > 1 || R::kVectors * kVector<X> <= kElements;
    constexpr bool kScalars = R::kMost <= kMaxThreads;
    constexpr bool kScalarPipelines = kScalars && (R::kCluster > 1 || !std::is_void_v<typename Ways::Pipelined>);
    cudaError_t error = cudaErrorNotSupported;
    if constexpr (kPipelines) {
      if (aligned_ && p_.extra) {
        error = try_pipelines<typename Ways::PipelinedExtra, R, Access::pipelined>();
      } else if (aligned_) {
        error = try_pipelines<typename Ways::Pipelined, R, Access::pipelined>();
      } else if constexpr (kScalarPipelines) {
        if (!divided_) error = try_pipelines<typename Ways::PipelinedScalar, R, Access::pipelined_scalar>();
      }
    }
    if (error != cudaErrorNotSupported) return error;
    if constexpr (R::kCluster == 1) {
      if (aligned_) return start<typename Ways::Vectors, R, Access::vectors>();
      if constexpr (kScalars && !std::is_void_v<typename Ways::Scalar>)
        if (!divided_) return start<typename Ways::Scalar, R, Access::scalar>();
    }
    return start<typename Ways::Elementwise, typename Ways::template ElementwiseRegime<R>, Access::elementwise>();
  }

 private:
  // cudaErrorNotSupported: there is no such kernel, or no room for its pipelines.
  template <typename Op, typename R, Access ACCESS>
  cudaError_t try_pipelines() {
    if constexpr (std::is_void_v<Op>) {
      return cudaErrorNotSupported;
    } else {
      if (!has_whole_runs()) return cudaErrorNotSupported;
      const PipelineArray x{sizeof(X), p_.cols}, dy{sizeof(typename Op::DY), p_.cols + p_.dy_pad};
      const int held = kDeferDx<Op, R, ACCESS == Access::pipelined> ? 2 : 1;
      const int bytes = Op::kExtra == Extra::pipelined ? launch_.with_pipelines(plan_, p_.cols, {x, dy, x}, held)
                                                       : launch_.with_pipelines(plan_, p_.cols, {x, dy}, held);
      return bytes > 0 ? start<Op, R, ACCESS>(bytes) : cudaErrorNotSupported;
    }
  }

  template <typename Op, typename R, Access ACCESS>
  cudaError_t start(int pipeline_bytes = 0) {
    // Thread groups that share a block add up their sums over rows where pipelines were.
    const int sums = plan_.rows_per_block > 1 ? plan_.block_threads() * kElements * int{sizeof(float)} : 0;
    return launch_groups(grad_kernel<Op, R, ACCESS>, plan_, room_.schedule.blocks, std::max(pipeline_bytes, sums),
                         stream_, p_, room_.partials, launch_);
  }

  // Whether neighbouring rows of one weight row, if there are such, are all that it has, and enough for every thread
  // group.
  bool has_whole_runs() const {
    const RowMapLaunch& rows = launch_.weight_rows;
    return !rows.has_neighbours || (p_.rows == rows.count.value * rows.inner.value && launch_.step <= launch_.end);
  }

  const GradCall<State>& p_;
  const Plan& plan_;
  const GradRoom& room_;
  const bool aligned_, divided_;
  const cudaStream_t stream_;
  GradRowsLaunch launch_;
};

// Launches the loop in the regime of a plan.
template <typename Ways, typename Regimes, typename State>
cudaError_t launch_grad_rows(Regimes regimes, const GradCall<State>& p, const Plan& plan, const RowMap& weight_rows,
                             const GradRoom& room, bool aligned, cudaStream_t stream) {
  GradLaunch<Ways, State> launch(p, plan, weight_rows, room, aligned, stream);
  return with_regime(regimes, plan, [&](auto regime) { return launch.run(regime); });
}

}  // namespace jaxnorm::cuda
