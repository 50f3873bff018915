// The forward of cross-entropy: it reads a row once, and writes only what the row comes to. Long rows are streamed.
#pragma once

#include "cuda/ops/max_sum.cuh"
#include "cuda/ops/norms.h"

namespace jaxnorm::cuda {

struct CrossEntropyCall : CrossEntropyForward {
  LogitScale logits;
  MaskLaunch mask_rows;

  explicit CrossEntropyCall(const CrossEntropyForward& p)
      : CrossEntropyForward(p), logits(p.scale, p.soft_cap, p.total != nullptr), mask_rows(p.mask) {}
};

struct CrossEntropyStatistics : MaxSum<true> {
  struct Statistics {
    float logsumexp, total;
  };

  __device__ static Statistics finish(const CrossEntropyCall& p, const Part& whole, float) {
    const LogitScale& logits = p.logits;
    const float total = whole.total() * (logits.factor * logits.unit);
    if (whole.sum() == 0 && whole.value[0] != whole.value[0]) return {-INFINITY, total};
    const float max = whole.value[0] * logits.unit;
    return {fabsf(max) < INFINITY ? max + logf(whole.sum()) : NAN, total};
  }

  __device__ static void write(const CrossEntropyCall& p, const Statistics& s, int64_t row) {
    p.logsumexp[row] = s.logsumexp;
    if (p.total) p.total[row] = s.total;
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
      const bool is_column = 0 <= label[r] && label[r] < p.cols;
      x_[r] = is_column ? static_cast<const X*>(p.x.data)[rows.row_to_read(r) * p.cols + label[r]] : X(0.0f);
    }
  }

  template <typename Group, typename Rows>
  __device__ void finish(const CrossEntropyCall& p, const RowsLaunch&, const Group&, const Rows& rows) const {
    if (!writes_) return;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      if (rows.is_written(r)) {
        const float x = static_cast<float>(x_[r]);
        p.label_logit[rows.row(r)] =
            p.logits.cap == 0 ? x * p.scale : tanh_of<float>(x * p.logits.cap).value * p.logits.factor;
      }
  }

 private:
  const bool writes_;
  X x_[ROWS];
};

template <typename X, bool MASKED>
struct CrossEntropyOp : LogitOp<X, CrossEntropyStatistics> {
  using Base = LogitOp<X, CrossEntropyStatistics>;
  using Params = CrossEntropyCall;
  template <typename Tile>
  using Load = LoadLogits<X, Tile, MASKED, true>;
  template <typename R, typename Tile>
  using Epilogue = LabelEpilogue<X, (Tile::KEPT ? Base::template kRows<R> : 1)>;
};

template <typename X>
cudaError_t run_cross_entropy(const CrossEntropyForward& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const CrossEntropyCall call(p);
  const Plan plan = make_cross_entropy_plan(kDtype<X>, p.cols);
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.x) && is_aligned_for<N>(p.mask);
  return with_regime<CrossEntropyRegimes<sizeof(X)>>(plan, [&](auto regime) {
    using R = decltype(regime);
    RowsLaunch launch(plan, p.cols, N, {});
    const RowLauncher<CrossEntropyOp<X, true>, R> masked{call, plan, launch, stream};
    if (!is_aligned) return masked.template direct<Access::elementwise>();
    if (p.mask) return masked.template direct<Access::vectors>();
    return RowLauncher<CrossEntropyOp<X, false>, R>{call, plan, launch, stream}.template direct<Access::vectors>();
  });
}

}  // namespace jaxnorm::cuda
