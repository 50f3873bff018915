// The gradient of cross-entropy with integer labels: all of a row is known before but its elements, so it goes by
// tiles.
#include "cuda/engine/tile_loop.cuh"
#include "cuda/ops.h"
#include "cuda/ops/exponential.cuh"
#include "cuda/ops/mask.cuh"
#include "cuda/ops/soft_cap.cuh"

namespace jaxnorm::cuda {
namespace {

// A call as the kernels see it.
struct Call {
  int64_t rows, cols;
  Input x;
  const int32_t* labels;
  const float *logsumexp, *dlogsumexp, *dlabel_logit, *dtotal;
  Output dx;
  float scale, soft_cap, scale_of_cap;  // scale / soft_cap
  MaskLaunch mask;

  explicit Call(const CrossEntropyBackward& p)
      : rows(p.rows),
        cols(p.cols),
        x(p.x),
        labels(p.labels),
        logsumexp(p.logsumexp),
        dlogsumexp(p.dlogsumexp),
        dlabel_logit(p.dlabel_logit),
        dtotal(p.dtotal),
        dx(p.dx),
        scale(p.scale),
        soft_cap(p.soft_cap),
        scale_of_cap(p.scale / p.soft_cap),
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

  // label: this thread's column of it, if it is one of its N.
  struct Row {
    float logsumexp, dlogsumexp, dlabel_logit, dtotal;
    int label;
    Counted<MASKED ? N : 1> counted;
  };

  __device__ static const Input& from(const Call& p) { return p.x; }
  __device__ static const Output& to(const Call& p) { return p.dx; }

  __device__ CrossEntropyGrad(const Call&, int64_t col, int remaining) : col_(col), remaining_(remaining) {}

  __device__ Row fetch(const Call& p, int64_t row) const {
    const int64_t label = __ldg(p.labels + row) - col_;
    Row numbers{__ldg(p.logsumexp + row),
                __ldg(p.dlogsumexp + row),
                p.dlabel_logit ? __ldg(p.dlabel_logit + row) : 0.0f,
                p.dtotal ? __ldg(p.dtotal + row) : 0.0f,
                label >= 0 && label < N ? static_cast<int>(label) : -1,
                {}};
    if constexpr (MASKED) numbers.counted = p.mask.of_row(row, p.cols).template counted<ALIGNED, N>(col_, remaining_);
    return numbers;
  }

  // From x to dx.
  __device__ void apply(const Call& p, const Row& row, float (&values)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float slope = p.scale, difference;  // slope: dz/dx
      if constexpr (CAPPED) {
        const Tanh tanh = tanh_of<T>(values[i] * p.scale_of_cap);
        slope *= tanh.complement;
        difference = fmaf(p.soft_cap, tanh.value, -row.logsumexp);
      } else {
        difference = fmaf(values[i], p.scale, -row.logsumexp);
      }
      const bool counts = !MASKED || row.counted[MASKED ? i : 0], is_label = i == row.label;
      float dz = counts ? fmaf(row.dlogsumexp, exponential(difference), row.dtotal) : 0.0f;
      if (is_label) dz += row.dlabel_logit;
      values[i] = counts || is_label ? slope * dz : 0.0f;
    }
  }

 private:
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

cudaError_t run(const CrossEntropyBackward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.x.dtype == Dtype::f32) return launch<float>(p, stream);
  return p.x.dtype == Dtype::f16 ? launch<__half>(p, stream) : launch<__nv_bfloat16>(p, stream);
}

}  // namespace jaxnorm::cuda
