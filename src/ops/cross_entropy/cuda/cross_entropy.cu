// The forward of cross-entropy: it reads a row once, and writes only what the row comes to. Long rows are streamed.
#include "engine/cuda/device.h"
#include "ops/cross_entropy/call.h"
#include "ops/shared/cuda/max_sum.cuh"

namespace jaxnorm::cuda {

struct CrossEntropyCall : CrossEntropyForward {
  LogitScale logits;
  MaskLaunch mask_rows;

  explicit CrossEntropyCall(const CrossEntropyForward& p)
      : CrossEntropyForward(p), logits(p.scale, p.soft_cap, true, p.total != nullptr), mask_rows(p.mask) {}
};

struct CrossEntropyStatistics : MaxSum<true> {
  struct Statistics {
    float log_sum, total, top;
    float origin;  // of what is relative to the top
  };

  __device__ static Statistics finish(const CrossEntropyCall& p, const Part& whole, float) {
    const float max = whole.value[0], unit = p.logits.unit;
    Statistics s{log1pf(whole.rest()), whole.total() * unit, fmaxf(max, -FLT_MAX), origin_of(max)};
    if (whole.rest() == -1) {
      if (max != max) s.top = -INFINITY;
    } else if (!(fabsf(max * unit) < INFINITY)) {
      s.log_sum = NAN;
    }
    if (!p.top) {
      s.log_sum = whole.rest() == -1 && max == max ? NAN : fmaf(s.origin, unit, s.log_sum);
      s.total = fmaf(s.origin * unit, whole.count(), s.total);
      s.origin = 0;
    }
    return s;
  }

  __device__ static void write(const CrossEntropyCall& p, const Statistics& s, int64_t row) {
    p.log_sum[row] = s.log_sum;
    if (p.total) p.total[row] = s.total;
    if (p.top) p.top[row] = s.top;
  }
};

// The logits of labels, which are on their way while a row is summed up.
template <typename X, int ROWS>
class LabelEpilogue : public RowEpilogue {
 public:
  template <typename Group, typename Rows>
  __device__ LabelEpilogue(const CrossEntropyCall& p, const RowsLaunch&, const Group& group, const Rows& rows)
      : writes_(group.begin + group.rank == 0) {
    if (!writes_) return;
    int label[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) label[r] = p.labels[rows.row_to_read(r)];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      names_column_[r] = 0 <= label[r] && label[r] < p.cols;
      x_[r] = names_column_[r] ? static_cast<const X*>(p.x.data)[rows.row_to_read(r) * p.cols + label[r]] : X(0.0f);
    }
  }

  template <typename Group, typename Rows>
  __device__ void finish(const CrossEntropyCall& p, const RowsLaunch&, const Group&, const Rows& rows) const {
    if (!writes_) return;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      if (rows.is_written(r)) {
        const float w = p.logits.template t_of<float>(static_cast<float>(x_[r])) * p.logits.factor;
        p.label_logit[rows.row(r)] = names_column_[r] ? (w - rows.s[r].origin) * p.logits.unit : 0.0f;
      }
  }

 private:
  const bool writes_;
  bool names_column_[ROWS];
  X x_[ROWS];
};

template <typename X, typename MASK>
struct CrossEntropyOp : LogitOp<X, CrossEntropyStatistics> {
  using Base = LogitOp<X, CrossEntropyStatistics>;
  using Params = CrossEntropyCall;
  template <typename Tile>
  using Load = LoadLogits<X, Tile, MASK, true>;
  template <typename R, typename Tile>
  using Epilogue = LabelEpilogue<X, (Tile::KEPT ? Base::template kRows<R> : 1)>;
};

template <typename X>
cudaError_t run_cross_entropy(const CrossEntropyForward& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const CrossEntropyCall call(p);
  const Plan plan = make_one_block_plan(kDtype<X>, p.cols);
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.x) && is_aligned_for<N>(p.mask);
  return with_regime<OneBlockRegimes<sizeof(X)>>(plan, [&](auto regime) {
    using R = decltype(regime);
    RowsLaunch launch(plan, p.cols, N, {});
    const RowLauncher<CrossEntropyOp<X, RowMask>, R> masked{call, plan, launch, stream};
    if (!is_aligned) return masked.template direct<Access::elementwise>();
    if (p.mask) return masked.template direct<Access::vectors>();
    return RowLauncher<CrossEntropyOp<X, NoMask>, R>{call, plan, launch, stream}.template direct<Access::vectors>();
  });
}

Outcome run(const CrossEntropyForward& p, Stream stream) {
  if (p.rows == 0) return {cudaSuccess};
  return {with_dtype(p.x.dtype, [&](auto x) { return run_cross_entropy<decltype(x)>(p, stream); })};
}

}  // namespace jaxnorm::cuda
