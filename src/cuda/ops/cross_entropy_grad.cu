// The gradient of cross-entropy with integer labels: all of a row is known before but its elements, so it goes by
// words of memory.
#include "cuda/engine/word_loop.cuh"
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

// MASKED: whether some columns do not count; CAPPED: whether there is a soft cap.
template <typename Element, bool MASKED, bool CAPPED>
class CrossEntropyGrad {
 public:
  using Params = Call;
  using T = Element;

  template <int N>
  struct Vector {
    Packed<T, N> x;
    Counted<MASKED ? N : 1> counted;
  };

  __device__ static const Input& from(const Call& p) { return p.x; }
  __device__ static const Output& to(const Call& p) { return p.dx; }

  __device__ CrossEntropyGrad(const Call& p, int64_t row, int64_t col)
      : x_(static_cast<const T*>(p.x.data) + (row * p.cols + col)),
        dx_(static_cast<T*>(p.dx.data) + (row * p.cols + col)) {
    const float scale = CAPPED ? 1.0f : p.scale;
    logsumexp_ = __ldg(p.logsumexp + row);
    of_sum_ = scale * __ldg(p.dlogsumexp + row);
    of_label_ = p.dlabel_logit ? scale * __ldg(p.dlabel_logit + row) : 0.0f;
    of_total_ = p.dtotal ? scale * __ldg(p.dtotal + row) : 0.0f;
    constexpr int64_t far = 1 << 30;  // farther than any column of this thread
    label_ = static_cast<int>(max(-far, min(far, __ldg(p.labels + row) - col)));
    if constexpr (MASKED) where_ = p.mask.where + (p.mask.where_rows.of_row(row) * p.cols + col);
  }

  template <int N>
  __device__ Vector<N> read(int at) const {
    Vector<N> vector{load<true, N>(x_ + at, N), {}};
    if constexpr (MASKED) {
      // A row of the mask goes with rows that may lie in their words in other ways.
      const RowMask mask{where_ + at, N};
      vector.counted =
          reinterpret_cast<uintptr_t>(mask.where) % N == 0 ? mask.counted<true, N>(0, N) : mask.counted<false, N>(0, N);
    }
    return vector;
  }

  template <int N>
  __device__ void write(const Call& p, int at, const Vector<N>& vector) const {
    float x[N], dx[N];
    unpack(vector.x, x);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Logit z(p, logsumexp_, x[i]);
      dx[i] = z.times_slope(fmaf(of_sum_, exponential(z.difference), of_total_));
      if (MASKED && !vector.counted[MASKED ? i : 0]) dx[i] = 0.0f;
    }
    const int label = label_ - at;
    if (label >= 0 && label < N) {  // of one vector of a row at most
      float x_of_label = x[0];
#pragma unroll
      for (int i = 1; i < N; ++i) x_of_label = i == label ? x[i] : x_of_label;
      const float term = Logit(p, logsumexp_, x_of_label).times_slope(of_label_);
#pragma unroll
      for (int i = 0; i < N; ++i) dx[i] = i == label ? dx[i] + term : dx[i];
    }
    store<true>(dx_ + at, pack<T>(dx), N);
  }

 private:
  // A logit z, less its row's logsumexp, and dz/dx, which without a cap is in the numbers of the row.
  struct Logit {
    float difference, slope;

    __device__ Logit(const Call& p, float logsumexp, float x) {
      if constexpr (CAPPED) {
        const Tanh tanh = tanh_of<T>(x * p.scale_of_cap);
        difference = fmaf(p.soft_cap, tanh.value, -logsumexp);
        slope = p.scale * tanh.complement;
      } else {
        difference = fmaf(x, p.scale, -logsumexp);
      }
    }

    __device__ float times_slope(float value) const { return CAPPED ? slope * value : value; }
  };

  const T* const x_;
  T* const dx_;
  float logsumexp_, of_sum_, of_label_, of_total_;
  int label_;
  const uint8_t* where_;
};

template <typename T, bool MASKED, bool CAPPED>
cudaError_t launch(const CrossEntropyBackward& p, cudaStream_t stream) {
  return launch_words<CrossEntropyGrad<T, MASKED, CAPPED>>(Call(p), stream);
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
