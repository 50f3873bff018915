// The forward with a quantised result. Rows have the plan of the forward without, so that the y that is quantised has
// the same bits.
#pragma once

#include "ops/norm/cuda/norm.cuh"
#include "ops/norm/cuda/quantized_epilogue.cuh"

namespace jaxnorm::cuda {

// These have no padding and draw no tickets. The alignment is the one with which fewest registers spill: the other has
// two kernels of f32 spill 16 bytes more, or two of each half type 40.
template <typename X>
struct alignas(sizeof(X) == 2 ? 8 : 1) QuantizedOwn {};
template <typename X>
using QuantizedLaunch = RowsLaunchOf<QuantizedOwn<X>>;

// A thread has up to 32 values in registers, of half types 64 where it has 8 vectors. ROOMY: with registers to spare.
// EXTRAS: see `Values`.
template <typename STATS, typename X, bool ROOMY, bool EXTRAS = false>
struct QuantizedOp : RowOp<X, STATS> {
  static constexpr bool kExtras = EXTRAS;
  using Params = QuantizedNormForward;
  using Launch = QuantizedLaunch<X>;
  template <typename R>
  static constexpr int kRoom = ROOMY             ? R::kRegisters.quantized_roomy
                               : STATS::kCentred ? R::kRegisters.quantized_centred
                                                 : R::kRegisters.quantized;
  template <typename R, Access ACCESS>
  static constexpr int kRegisters = kRoom<R>;

  // Of a thread, with its packed rows and the scale. Sums with a mean leave no room for it.
  template <typename R>
  static constexpr int kWithScale =
      R::kVectors * kVector<X> * (R::template kRows<> + 1) * static_cast<int>(sizeof(X)) / 4;
  template <typename R>
  static constexpr bool kHoldsScale = !STATS::kCentred && ((kRoom<R> == 64 && kWithScale<R> <= 32) || kRoom<R> == 128);

  template <typename Tile>
  using Load = LoadFloats<X, Floats<Tile>>;
  template <typename R, typename Tile>
  using Epilogue = QuantizeEpilogue<QuantizedOp, Tile, kHoldsScale<R>>;
};

template <typename STATS, typename X, bool ADDS, bool EXTRAS = false>
struct PipelinedQuantizedOp : RowOp<X, STATS> {
  static constexpr bool kExtras = EXTRAS;
  using Params = QuantizedNormForward;
  using Launch = QuantizedLaunch<X>;
  // With a bound of what it may have anyway the compiler spills more where it adds, and less where it does not.
  template <typename R, Access ACCESS>
  static constexpr int kRegisters = ADDS ? 0 : 128;
  template <typename Tile>
  using Load = std::conditional_t<ADDS, LoadSum<X, X, Tile>, LoadRow<X, Tile>>;
  // Beside more values than these, or sums on their way, there is no room for scale in registers.
  template <typename R, typename Tile>
  using PipelinedEpilogue =
      PipelinedQuantize<PipelinedQuantizedOp, Tile, (Tile::VECTORS * Tile::N <= (ADDS ? 16 : 32))>;
};

// Everything else.
template <typename STATS, typename X>
struct AnyQuantizedOp : RowOp<X, STATS> {
  using Params = QuantizedNormForward;
  using Launch = QuantizedLaunch<X>;
  template <typename R, Access ACCESS>
  using Tile = RereadTiling<X, R, ACCESS>;
  template <typename R, Access ACCESS>
  static constexpr int kRegisters = 0;
  template <typename Tile>
  static constexpr bool kLoops = false;
  template <typename Tile>
  using Load = LoadRow<X, Tile, false>;
  template <typename R, typename Tile>
  using Epilogue = AnyQuantize<AnyQuantizedOp, Tile>;
};

template <typename STATS, typename X>
class QuantizedLauncher {
 public:
  QuantizedLauncher(const QuantizedNormForward& p, const Plan& plan, cudaStream_t stream)
      : p_(p), plan_(plan), stream_(stream), launch_(plan, p.cols, N, p.weight_rows) {}

  cudaError_t run() {
    using Table = ForwardRegimes<sizeof(X)>;
    if (plan_.vectors != kStreamed && is_aligned_ && is_known()) {
      const cudaError_t error = with_regime<Table>(plan_, [&](auto regime) { return run_known<decltype(regime)>(); });
      if (error != cudaErrorNotSupported) return error;
    }
    if (p_.sum || p_.y) return cudaErrorNotSupported;
    return with_regime<Table>(plan_, [&](auto regime) { return run_any<decltype(regime)>(); });
  }

 private:
  static constexpr int N = kVector<X>;

  bool wants_extras() const { return p_.y || p_.quantized.group == kGroups[0]; }

  // Weights of x's type or f32, a bias only in LayerNorm, and beside a scale of its type.
  bool is_known() const {
    const auto is_x_or_f32 = [](const Input& weight) {
      return !weight || weight.dtype == kDtype<X> || weight.dtype == Dtype::f32;
    };
    const bool bias = !p_.bias || (STATS::kCentred && p_.scale && p_.bias.dtype == p_.scale.dtype);
    return bias && is_x_or_f32(p_.scale) && is_x_or_f32(p_.quantized.smooth) && (!p_.y || p_.y.dtype == kDtype<X>) &&
           (!p_.sum || (p_.x.dtype == kDtype<X> && p_.sum.dtype == kDtype<X>));
  }

  // Whether the forward without quantisation goes by elements, as it does where vectors do not divide a row of a call
  // with known weights. Its sums are then of another order.
  bool goes_by_elements() const {
    if (p_.cols % N == 0 || plan_.vectors == kStreamed) return false;
    if (!cuda::is_known<STATS, X>(p_, Dtype::f32, true)) return false;
    auto launch = launch_;
    const PipelineArray x{sizeof(X), p_.cols};
    return plan_.blocks_per_row == 1 || launch.with_pipelines(plan_, p_.cols, {x}, 2) > 0;
  }

  template <typename Op, typename R>
  RowLauncher<Op, R> launcher() {
    return {p_, plan_, launch_, stream_};
  }

  template <typename R>
  cudaError_t run_known() {
    if constexpr (R::kVectors == kStreamed) {
      return cudaErrorNotSupported;
    } else if constexpr (R::kCluster == 1) {
      using Op = QuantizedOp<STATS, X, false>;
      using Roomy = QuantizedOp<STATS, X, true>;
      if (wants_extras()) return launcher<QuantizedOp<STATS, X, true, true>, R>().template direct<Access::vectors>();
      if constexpr (Roomy::template kRoom<R> > Op::template kRoom<R>) {
        const int64_t blocks = plan_.blocks_of(p_.rows, Op::template kRows<R>);
        const int64_t at_once =
            resident_blocks(Roomy::template kRoom<R>, plan_.block_threads()) * current_device().multiprocessors;
        if (p_.sum || blocks <= at_once) return launcher<Roomy, R>().template direct<Access::vectors>();
      }
      return launcher<Op, R>().template direct<Access::vectors>();
    } else if (p_.y) {
      return cudaErrorNotSupported;
    } else {
      return p_.sum ? run_pipelined<R, true>() : run_pipelined<R, false>();
    }
  }

  template <typename R, bool ADDS>
  cudaError_t run_pipelined() {
    return wants_extras() ? run_pipelined_as<R, PipelinedQuantizedOp<STATS, X, ADDS, true>>()
                          : run_pipelined_as<R, PipelinedQuantizedOp<STATS, X, ADDS>>();
  }

  template <typename R, typename Op>
  cudaError_t run_pipelined_as() {
    using Epilogue = typename Op::template PipelinedEpilogue<R, Tiling<X, R, Access::pipelined>>;
    const int bias = plan_.block_threads() * Epilogue::shared_bytes(p_.bias);
    return launcher<Op, R>().template pipelined<Access::pipelined>({}, bias);
  }

  template <typename R>
  cudaError_t run_any() {
    using Own = typename Reread<R>::Regime;
    using Any = Regime<Own::kThreads, Own::kVectors, Own::kCluster>;  // of however many threads
    const auto any = launcher<AnyQuantizedOp<STATS, X>, Any>();
    if constexpr (R::kVectors == kStreamed) {
      if (is_aligned_) return any.template direct<Access::vectors>();
    } else if constexpr (std::is_same_v<X, float>) {  // calls with an f32 y of half types have no known weights
      if (goes_by_elements()) return any.template direct<Access::scalar>();
    }
    return any.template direct<Access::elementwise>();
  }

  const QuantizedNormForward& p_;
  const Plan& plan_;
  const cudaStream_t stream_;
  QuantizedLaunch<X> launch_;
  const bool is_aligned_ = p_.cols % N == 0 && are_aligned<N>(p_.x, p_.addend, p_.scale, p_.bias, p_.sum, p_.y,
                                                              p_.quantized.smooth, p_.quantized.values);
};

template <typename X>
cudaError_t run_quantized_norm(const QuantizedNormForward& p, const Plan& plan, cudaStream_t stream) {
  return with_stats(p.kind, [&](auto stats) { return QuantizedLauncher<decltype(stats), X>(p, plan, stream).run(); });
}

}  // namespace jaxnorm::cuda
