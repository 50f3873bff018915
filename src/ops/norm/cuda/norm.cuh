// The forward of RMSNorm and LayerNorm, of x or of a sum: the row in registers or shared memory between its
// statistics and its epilogue.
#pragma once

#include "ops/norm/call.h"
#include "ops/norm/cuda/affine.cuh"
#include "ops/shared/cuda/load.cuh"
#include "ops/shared/cuda/stats.cuh"

namespace jaxnorm::cuda {

// Calls with known weights. S: the type of what is normalised; X: of x and y; ADDS: a sum of x is normalised.
template <typename STATS, typename S, typename X, typename W, bool ADDS>
struct NormOp : RowOp<S, STATS, ADDS ? 2 : 1> {
  using Base = RowOp<S, STATS, ADDS ? 2 : 1>;
  using Params = std::conditional_t<ADDS, AddNormForward, NormForward>;
  using Known = W;
  using Y = X;
  // Where nothing is added padding is rare, and would cost registers.
  static constexpr bool kPads = ADDS;

  template <typename Tile>
  using Load = std::conditional_t<ADDS, LoadSum<X, S, Tile>, LoadRow<X, Tile, (Tile::N > 1 || STATS::kCentred)>>;
  template <typename R, typename Tile>
  using Epilogue = AffineEpilogue<NormOp, R, Tile>;
  template <typename R, typename Tile>
  using PipelinedEpilogue = PipelinedAffine<NormOp, R, Tile>;

  // Beside LayerNorm's sums there is no room for a scale in 80 registers either.
  template <typename R, Access ACCESS>
  static constexpr int kRegisters =
      ACCESS == Access::vectors && !ADDS && !STATS::kCentred && std::is_same_v<typename W::Element, S>
          ? R::kRegisters.weights
          : Base::template kRegisters<R, ACCESS>;

  template <Access ACCESS>
  static constexpr bool kDynamic = is_dynamic(STATS::kCentred, kDtype<S>) && ACCESS == Access::pipelined;
};

// Any other call. By vectors a row is at hand for its statistics, and read once more for its results.
template <typename STATS, typename X>
struct AnyNormOp : RowOp<X, STATS> {
  using Params = NormForward;
  template <typename R, Access ACCESS>
  using Tile = std::conditional_t<ACCESS == Access::vectors, Tiling<X, R, ACCESS>, RereadTiling<X, R, ACCESS>>;
  template <typename Tile>
  using Load = LoadRow<X, Tile, (Tile::N > 1 || STATS::kCentred)>;
  template <typename R, typename Tile>
  using Epilogue = AnyEpilogue<AnyNormOp, R, Tile>;
};

// Whether more than any call has is known of one with per-head weights: short rows, as attention has them.
template <typename S, typename R>
constexpr bool is_per_head_known() {
  constexpr int most = R::kThreads * R::kVectors * kVector<S>;
  return R::kThreads > 0 && most >= 64 && most <= 256;
}

// What models have is known to the compiler: weights of x's type or f32, RMSNorm without a bias, LayerNorm rounded
// once. Calls f(Weights) for such a call, f(void pointer) for any other.
template <typename STATS, typename X, typename F>
auto with_weights(const NormOperands& p, Dtype y, bool multiply_before_cast, F f) {
  constexpr bool kCentred = STATS::kCentred;
  const auto all_are = [&](Dtype dtype) { return p.scale.dtype == dtype && (!p.bias || p.bias.dtype == dtype); };
  const bool rounds = !multiply_before_cast && y != Dtype::f32;
  if (!p.scale || y != kDtype<X> || (kCentred ? rounds : bool{p.bias})) return f(static_cast<void*>(nullptr));
  if (all_are(kDtype<X>)) return f(VaryingWeights<X, kCentred>{});
  if constexpr (sizeof(X) < 4)
    if (all_are(Dtype::f32)) return f(VaryingWeights<float, kCentred>{});
  return f(static_cast<void*>(nullptr));
}

template <typename W>
constexpr bool kIsKnown = !std::is_pointer_v<W>;

// float16 beside weights of f32 is rare: such rows go as any do, but for those of pipelines, whose kernels have all
// weights as floats.
template <typename S, typename W>
constexpr bool kIsRare = std::is_same_v<S, __half> && !std::is_same_v<typename W::Element, S>;

template <typename STATS, typename X>
bool is_known(const NormOperands& p, Dtype y, bool multiply_before_cast) {
  return with_weights<STATS, X>(p, y, multiply_before_cast, [](auto weights) { return kIsKnown<decltype(weights)>; });
}

// A small batch has too few rows for every multiprocessor to have one: a block for each vector of a thread. Each sums
// up the whole row, in the order of the kernel for many rows and so to the same bits, and finishes its part of it. The
// row is read several times, but once from memory. All that the kernel has to know. With every argument of a forward
// and of a launch it would take a tenth of a microsecond longer.
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

// A call in a regime.
template <typename STATS, typename S, typename R>
class NormLauncher {
 public:
  NormLauncher(const NormForward& p, const Plan& plan, cudaStream_t stream)
      : p_(p), plan_(plan), stream_(stream), launch_(plan, p.cols, N, p.weight_rows) {
    launch_.own.y_pad = p.y_stride - p.cols;
  }

  // By way of the kernel with the most that is known.
  template <typename W>
  cudaError_t run(W weights) {
    if constexpr (R::kVectors != kStreamed && kIsKnown<W>) {  // a streamed row's epilogue reads it once more anyway
      cudaError_t error = cudaErrorNotSupported;
      if constexpr (R::kCluster > 1) {
        if (p_.weight_rows.count == 1) error = run_pipelined<W>();
      } else if constexpr (!kIsRare<S, W>) {
        if (p_.weight_rows.count == 1) {
          error = run_known<W>();
        } else if constexpr (is_per_head_known<S, R>()) {
          error = run_known<typename W::PerHead>();
        }
      }
      if (error != cudaErrorNotSupported) return error;
    }
    return run_any();
  }

 private:
  static constexpr int N = kVector<S>;

  template <typename Op>
  RowLauncher<Op, R> launcher(const typename Op::Params& p) {
    return {p, plan_, launch_, stream_};
  }

  template <typename W>
  cudaError_t run_known() {
    using Op = NormOp<STATS, S, S, W, false>;
    if (pads_) return cudaErrorNotSupported;
    if constexpr (!W::kPerHead && R::kThreads == kWholeBlock)
      if (is_aligned_ && is_small_batch<R>(p_)) return launch_small_batch<STATS, S, R, W>(p_, plan_, launch_, stream_);
    const auto launch_as = [&](auto access) {
      constexpr Access kAccess = decltype(access)::value;
      return launcher<Op>(p_).template direct<kAccess>();
    };
    if (is_aligned_) return launch_as(AccessAs<Access::vectors>{});
    if constexpr (!R::kDividedOnly && !W::kPerHead) {
      // Whatever is aligned to less than vectors is unaligned vectors, but for f32: its vectors have fewer elements,
      // and rows that they do not divide would take longer so.
      if constexpr (sizeof(S) == 2)
        if (are_aligned<N>(p_.scale, p_.bias)) return launch_as(AccessAs<Access::unaligned>{});
      if constexpr (sizeof(S) == 4)
        if (!is_divided_) return launch_as(AccessAs<Access::scalar>{});
    }
    return cudaErrorNotSupported;
  }

  // What comes by way of a pipeline is copied in bulk, and so aligned to 16 bytes.
  template <typename W>
  cudaError_t run_pipelined() {
    using Op = NormOp<STATS, S, S, typename W::template Floats<S>, false>;
    if (is_aligned_) return launcher<Op>(p_).template pipelined<Access::pipelined>(p_.workspace);
    if (!is_divided_) return launcher<Op>(p_).template pipelined<Access::pipelined_scalar>(p_.workspace);
    return cudaErrorNotSupported;
  }

  // Per-head weights and padding leave a row the sums that it has without them. Of half types those are of vectors
  // anyway.
  cudaError_t run_any() {
    const auto launcher = this->launcher<AnyNormOp<STATS, S>>(p_);
    if constexpr (sizeof(S) == 4 && R::kCluster == 1 && R::kVectors != kStreamed)
      if ((p_.weight_rows.count > 1 || pads_) && !is_divided_ &&
          is_known<STATS, S>(p_, p_.y.dtype, p_.multiply_before_cast))
        return launcher.template direct<Access::scalar>();
    return is_aligned_ ? launcher.template direct<Access::vectors>() : launcher.template direct<Access::elementwise>();
  }

  const NormForward& p_;
  const Plan& plan_;
  const cudaStream_t stream_;
  RowsLaunch launch_;
  const bool pads_ = p_.y_stride != p_.cols, is_divided_ = p_.cols % N == 0;
  const bool is_aligned_ = is_divided_ && p_.y_stride % N == 0 && are_aligned<N>(p_.x, p_.y, p_.scale, p_.bias);
};

template <typename S>
cudaError_t run_norm(const NormForward& p, const Plan& plan, cudaStream_t stream) {
  return with_stats(p.kind, [&](auto stats) {
    using STATS = decltype(stats);
    return with_regime<ForwardRegimes<sizeof(S)>>(plan, [&](auto regime) {
      return with_weights<STATS, S>(p, p.y.dtype, p.multiply_before_cast, [&](auto weights) {
        return NormLauncher<STATS, S, decltype(regime)>(p, plan, stream).run(weights);
      });
    });
  });
}

}  // namespace jaxnorm::cuda
