// The gradient of cross-entropy with integer labels: all of a row is known before but its elements, so it goes by
// tiles.
#include "engine/cuda/device.h"
#include "engine/cuda/tile_loop.cuh"
#include "ops/cross_entropy/call.h"
#include "ops/shared/cuda/logits.cuh"
#include "ops/shared/cuda/mask.cuh"

namespace jaxnorm::cuda {
namespace {

// A call as the kernels see it.
struct Call {
  int64_t rows, cols;
  Input x;
  const int32_t* labels;
  const float *log_sum, *dlog_sum, *top, *dlabel_logit, *dtotal;
  Output dx;
  Scale scale;
  float soft_cap, scale_of_cap;  // scale / soft_cap
  MaskLaunch mask;

  explicit Call(const CrossEntropyBackward& p)
      : rows(p.rows),
        cols(p.cols),
        x(p.x),
        labels(p.labels),
        log_sum(p.log_sum),
        dlog_sum(p.dlog_sum),
        top(p.top),
        dlabel_logit(p.dlabel_logit),
        dtotal(p.dtotal),
        dx(p.dx),
        scale(p.scale),
        soft_cap(p.soft_cap),
        scale_of_cap(p.scale.whole / p.soft_cap),
        mask(p.mask) {}
};

// IS_ALIGNED: arrays; MASKED: whether some columns do not count; CAPPED: whether there is a soft cap.
template <typename T, bool IS_ALIGNED, bool MASKED, bool CAPPED>
class CrossEntropyGrad {
 public:
  using Params = Call;
  using X = T;
  using Y = T;
  static constexpr bool ALIGNED = IS_ALIGNED;
  static constexpr int N = kVector<T>;

  // label: this thread's column of it, if it is one of its N; kNoLabel, or of a row that is left out kLeftOut.
  struct Row {
    float log_sum, origin, dlog_sum, dlabel_logit, dtotal;
    int label;
    Counted<MASKED ? N : 1> counted;
  };
  static constexpr int kNoLabel = -1, kLeftOut = -2;

  __device__ static const Input& from(const Call& p) { return p.x; }
  __device__ static const Output& to(const Call& p) { return p.dx; }

  __device__ CrossEntropyGrad(const Call&, int64_t col, int remaining) : col_(col), remaining_(remaining) {}

  __device__ Row fetch(const Call& p, int64_t row) const {
    const int32_t label = __ldg(p.labels + row);
    const int64_t own = label - col_;
    const float log_sum = __ldg(p.log_sum + row);
    Row numbers{log_sum == -INFINITY ? 0.0f : log_sum,
                p.top ? origin_of(__ldg(p.top + row)) : 0.0f,
                __ldg(p.dlog_sum + row),
                p.dlabel_logit ? __ldg(p.dlabel_logit + row) : 0.0f,
                p.dtotal ? __ldg(p.dtotal + row) : 0.0f,
                label == kIgnored     ? kLeftOut
                : own >= 0 && own < N ? static_cast<int>(own)
                                      : kNoLabel,
                {}};
    if constexpr (MASKED)
      numbers.counted = RowMask::of(p.mask, row, p.cols).template counted<ALIGNED, N>(col_, remaining_);
    return numbers;
  }

  // From x to dx.
  __device__ void apply(const Call& p, const Row& row, float (&values)[N]) const {
    float at_label = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float slope = p.scale.whole, log_share;  // slope: dz/dx
      if constexpr (CAPPED) {
        const Tanh tanh = tanh_of<float>(values[i] * p.scale_of_cap);
        slope *= tanh.complement;
        log_share = tanh.value * p.soft_cap - row.origin - row.log_sum;
      } else {
        log_share = fmaf(fmaf(values[i], p.scale.power, -row.origin), p.scale.unit, -row.log_sum);
      }
      const bool counts = !MASKED || row.counted[MASKED ? i : 0];
      if (i == row.label) at_label = slope_times(slope, of_label(row, counts, log_share));
      values[i] = counts ? slope * fmaf(row.dlog_sum, exponential(log_share), row.dtotal) : 0.0f;
    }
    if (row.label == kNoLabel) return;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (row.label == kLeftOut) {
        values[i] = 0;
      } else if (i == row.label) {
        values[i] = at_label;
      }
  }

 private:
  // dz of the label. Its terms cancel where the row's loss is small.
  __device__ static float of_label(const Row& row, bool counts, float log_share) {
    if (!counts) return row.dlabel_logit;
    const bool is_most = log_share > kMostOfRow;
    const float share = is_most ? exponential_less_1(log_share) : exponential(log_share);
    const float of_logit = is_most ? row.dlog_sum + row.dlabel_logit : row.dlabel_logit;
    return fmaf(row.dlog_sum, share, of_logit) + row.dtotal;
  }

  // Of a label whose logit has no gradient it may be no number.
  __device__ static float slope_times(float slope, float dz) { return dz == 0 ? 0.0f : slope * dz; }

  const int64_t col_;
  const int remaining_;
};

template <typename T, bool MASKED, bool CAPPED>
cudaError_t launch(const CrossEntropyBackward& p, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const Call call(p);
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.x, p.dx) && is_aligned_for<N>(p.mask);
  return is_aligned ? launch_tiles<CrossEntropyGrad<T, true, MASKED, CAPPED>>(call, stream)
                    : launch_tiles<CrossEntropyGrad<T, false, MASKED, CAPPED>>(call, stream);
}

template <typename T>
cudaError_t launch(const CrossEntropyBackward& p, cudaStream_t stream) {
  if (p.soft_cap != 0) return p.mask ? launch<T, true, true>(p, stream) : launch<T, false, true>(p, stream);
  return p.mask ? launch<T, true, false>(p, stream) : launch<T, false, false>(p, stream);
}

}  // namespace

Outcome run(const CrossEntropyBackward& p, Stream stream) {
  if (p.rows == 0) return {cudaSuccess};
  return {with_dtype(p.x.dtype, [&](auto x) { return launch<decltype(x)>(p, stream); })};
}

}  // namespace jaxnorm::cuda
