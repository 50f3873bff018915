// The forward of softmax and log-softmax, and from a call, in either direction, to the code for its dtype.
#include "engine/cuda/device.h"
#include "ops/shared/cuda/max_sum.cuh"
#include "ops/softmax/call.h"
#include "ops/softmax/cuda/regimes.h"

namespace jaxnorm::cuda {

struct SoftmaxCall : SoftmaxForward {
  LogitScale logits;
  MaskLaunch mask_rows;

  explicit SoftmaxCall(const SoftmaxForward& p)
      : SoftmaxForward(p), logits(p.scale, 0, p.log, false), mask_rows(p.mask) {}

  // Writes the columns of a row outside its window.
  __device__ void fill_outside(const Rounds& columns, int64_t row) const {
    with_type(y.dtype, [&](auto* type) {
      using Y = std::remove_pointer_t<decltype(type)>;
      cuda::fill_outside(columns, static_cast<Y*>(y.data) + row * cols, cols, log ? -INFINITY : 0.0f);
    });
  }
};

struct SoftmaxStatistics : MaxSum<false> {
  // A logit's distance from the largest one has `by` subtracted, or its exponential is multiplied by it.
  struct Statistics {
    float max, by;
  };

  // A largest logit that is not finite leaves nothing to be computed, unless no column counts.
  __device__ static Statistics finish(const SoftmaxCall& p, const Part& whole, float) {
    const float max = whole.value[0];
    float rest = whole.rest();
    if (rest == -1 && max != max) return {0, p.log ? -INFINITY : 0};
    if (!(fabsf(max * p.logits.unit) < INFINITY)) rest = NAN;
    return {max, p.log ? log1pf(rest) : reciprocal(1.0f + rest)};
  }

  __device__ static void write(const SoftmaxCall& p, const Statistics& s, int64_t row) {
    if (!p.log_sum) return;
    if (!p.top) {
      p.log_sum[row] = fmaf(s.max, p.logits.unit, s.by);
    } else {
      const bool is_nothing = s.by == -INFINITY;
      p.top[row] = is_nothing ? -INFINITY : fmaxf(s.max, -FLT_MAX);
      p.log_sum[row] = s.max == -INFINITY ? -INFINITY : s.by;
    }
  }
};

// For both loops. MASK: as of LogitRow. Beside one y may be of any type; otherwise it is of x's.
template <typename X, typename MASK, typename Tile>
class SoftmaxEpilogue : public RowEpilogue {
 public:
  template <typename... Args>
  __device__ explicit SoftmaxEpilogue(const Args&...) {}
  __device__ void arrive(const SoftmaxCall&) {}

  template <typename Group, typename Rows>
  __device__ __forceinline__ void finish(const SoftmaxCall& p, const RowsLaunch& launch, const Group& group,
                                         const Rows& rows) const {
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r)
      if (rows.is_written(r)) finish<void>(p, launch, group, rows.s[r], rows.row(r), rows.x[r]);
  }

  template <typename Load, typename Group, typename Row>
  __device__ __forceinline__ void finish(const SoftmaxCall& p, const RowsLaunch&, const Group& group,
                                         const SoftmaxStatistics::Statistics& s, int64_t row, const Row& x) const {
    if (p.log) {
      write<true>(p, group, s, row, x);
    } else {
      write<false>(p, group, s, row, x);
    }
  }

 private:
  static constexpr int N = Tile::N;
  static constexpr bool MASKED = MASK::kMasks;
  // Whether y may be written by the words of memory in which its vectors lie.
  static constexpr bool kByWords = !Tile::ALIGNED && !Tile::STREAMED && !MASK::kHasWindow && sizeof(X) == 2;

  template <bool LOG, typename Group, typename Row>
  __device__ __forceinline__ static void write(const SoftmaxCall& p, const Group& group,
                                               const SoftmaxStatistics::Statistics& s, int64_t row, const Row& x) {
    constexpr float other = LOG ? -INFINITY : 0;  // of columns that do not count
    // Of finite ones that is what they come to.
    const bool others = MASKED && !(fabsf(s.by) < INFINITY);
    // Exponentials may be of distances from the thread's own maximum, and are multiplied by how far that is off.
    constexpr bool kOwn = Tile::HELD != Held::nothing;
    const float origin = kOwn ? origin_of(x.held_max()) : s.max;
    const float by = kOwn ? p.logits.between(x.held_max(), s.max) * s.by : s.by;
    X* to = static_cast<X*>(p.y.data) + row * p.cols;
    if constexpr (!MASKED) hide(to);
    [[maybe_unused]] UnalignedWriter<X, Tile> words(group, to);
    x.for_each(group, [&](int vec, auto col, int remaining, const auto& vector) {
      float y[N];
      if (x.may_count(col, remaining)) {
        if constexpr (LOG) {
          x.get_t(vec, col, remaining, vector, y);
#pragma unroll
          for (float& value : y) value = fmaf(fmaf(value, p.logits.factor, -s.max), p.logits.unit, -s.by);
        } else {
          x.get_exponentials(vec, col, remaining, vector, origin, by, y);
        }
        if (others) x.set_others(col, remaining, other, y);
      } else {
#pragma unroll
        for (float& value : y) value = other;
      }
      if constexpr (!MASKED) {
        store<true>(to + col, pack<X>(y), remaining);
      } else if (kByWords && p.y.dtype == kDtype<X>) {
        if constexpr (kByWords) words.write(vec, col, remaining, pack<X>(y), true);
      } else {
        with_type(p.y.dtype, [&](auto* type) {
          using Y = std::remove_pointer_t<decltype(type)>;
          store<Tile::ALIGNED>(static_cast<Y*>(p.y.data) + row * p.cols + col, pack<Y>(y), remaining);
        });
      }
    });
  }
};

template <typename X, typename MASK>
struct SoftmaxOp : LogitOp<X, SoftmaxStatistics> {
  using Base = LogitOp<X, SoftmaxStatistics>;
  using Params = SoftmaxCall;

  // As of RMSNorm: see has_tickets.
  template <Access ACCESS>
  static constexpr bool kDynamic = true;

  // Rows of which a thread may hold its exponentials, so that it computes one of an element instead of two: those of
  // clusters, of which it has two, and of the blocks that have least to hide the second behind. However such rows go,
  // their results are products of these.
  template <typename R>
  static constexpr int kElements = R::kVectors * kVector<X>;
  template <typename R>
  static constexpr bool kHoldsTwo = R::kCluster > 1 && R::kVectors != kStreamed && (kElements<R> <= 32);
  template <typename R>
  static constexpr bool kHoldsOne = R::kThreads == kWholeBlock && R::kMost == 256 && kElements<R> == 64;
  template <typename R, Access ACCESS>
  static constexpr bool kHoldsValues =
      kIsPipelined<ACCESS> || (kHoldsOne<R> && !MASK::kMasks && ACCESS == Access::vectors);
  template <typename R, Access ACCESS>
  static constexpr Held kHeld = !kHoldsOne<R> && !kHoldsTwo<R> ? Held::nothing
                                : kHoldsValues<R, ACCESS>      ? Held::values
                                                               : Held::maximum;
  template <typename R, Access ACCESS>
  using Tile = LogitTiling<X, R, ACCESS, kHeld<R, ACCESS>>;
  template <typename Tile>
  using Load = LoadLogits<X, Tile, MASK, false>;
  template <typename R, typename Tile>
  using Epilogue = SoftmaxEpilogue<X, MASK, Tile>;
  template <typename R, typename Tile>
  using PipelinedEpilogue = SoftmaxEpilogue<X, MASK, Tile>;

  // Eight vectors of blocks of this size, and what they are unpacked to, take more than the registers with which two
  // blocks fit; f32 only beside a mask. So do streamed rows whose vectors are put together.
  template <typename R, Access ACCESS>
  static constexpr bool kIsRoomy = R::kVectors == 8 ? R::kMost == kMaxThreads && (MASK::kMasks || R::kCluster > 1)
                                   : R::kVectors == kStreamed ? ACCESS == Access::elementwise
                                                              : false;
  template <typename R, Access ACCESS>
  static constexpr int kRegisters = kIsRoomy<R, ACCESS> ? 128 : Base::template kRegisters<R, ACCESS>;
};

// What is read past a length would be read for nothing, so that rows with a mask never come by way of pipelines.
template <typename X, typename R>
cudaError_t launch_softmax(const SoftmaxCall& p, const Plan& plan, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  RowsLaunch launch(plan, p.cols, N, {});
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.x, p.y) && is_aligned_for<N>(p.mask);
  const RowLauncher<SoftmaxOp<X, RowMask>, R> masked{p, plan, launch, stream};
  if (!is_aligned) return masked.template direct<Access::elementwise>();
  if (p.mask || p.y.dtype != kDtype<X>) return masked.template direct<Access::vectors>();
  const RowLauncher<SoftmaxOp<X, NoMask>, R> plain{p, plan, launch, stream};
  if constexpr (R::kCluster > 1 && R::kVectors != kStreamed) {
    const cudaError_t error = plain.template pipelined<Access::pipelined>(p.workspace);
    return error == cudaErrorNotSupported ? masked.template direct<Access::vectors>() : error;
  } else {
    return plain.template direct<Access::vectors>();
  }
}

// Rows with a window, in a regime of theirs.
template <typename X, typename R>
cudaError_t launch_windows(const SoftmaxCall& p, const Plan& plan, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  RowsLaunch launch(plan, p.cols, N, {});
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.x, p.y) && is_aligned_for<N>(p.mask);
  return RowLauncher<SoftmaxOp<X, WindowMask>, R>{p, plan, launch, stream}.run(is_aligned);
}

template <typename X>
cudaError_t run_softmax(const SoftmaxForward& p, const Plan& plan, cudaStream_t stream) {
  const SoftmaxCall call(p);
  if (p.mask.has_window())
    return with_regime<WindowRegimes>(
        plan, [&](auto regime) { return launch_windows<X, decltype(regime)>(call, plan, stream); });
  return with_regime<ForwardRegimes<sizeof(X)>>(
      plan, [&](auto regime) { return launch_softmax<X, decltype(regime)>(call, plan, stream); });
}

// Its rows are those of an RMSNorm: read once, and written. Those with a window have a plan of their own.
Outcome run(const SoftmaxForward& p, Stream stream) {
  if (p.rows == 0) return {cudaSuccess};
  const Plan plan = p.mask.has_window()
                        ? make_window_plan(p.x.dtype, p.cols)
                        : make_forward_plan(/*centred=*/false, p.x.dtype, p.cols, current_device().max_cluster());
  return {with_dtype(p.x.dtype, [&](auto type) { return run_softmax<decltype(type)>(p, plan, stream); })};
}

// Of softmax_grad.cuh. T: of all arrays; AnyElement: of each another, as far as the op allows.
template <typename T>
cudaError_t softmax_grad_of(const SoftmaxBackward& p, cudaStream_t stream);
template <typename T>
cudaError_t log_softmax_grad_of(const LogSoftmaxBackward& p, cudaStream_t stream);

Outcome run(const SoftmaxBackward& p, Stream stream) {
  if (p.rows == 0) return {cudaSuccess};
  if (p.dx.dtype != p.y.dtype) return {softmax_grad_of<AnyElement>(p, stream)};
  return {with_dtype(p.y.dtype, [&](auto type) { return softmax_grad_of<decltype(type)>(p, stream); })};
}

Outcome run(const LogSoftmaxBackward& p, Stream stream) {
  if (p.rows == 0) return {cudaSuccess};
  if (p.dy.dtype != p.x.dtype) return {log_softmax_grad_of<AnyElement>(p, stream)};
  return {with_dtype(p.x.dtype, [&](auto type) { return log_softmax_grad_of<decltype(type)>(p, stream); })};
}

WorkspaceSize softmax_workspace(const WorkspaceQuery& query) {
  return {0, has_tickets(/*centred=*/false, query.dtype, query.cols) ? 1 : 0};
}

}  // namespace jaxnorm::cuda
