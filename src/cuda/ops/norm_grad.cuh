// The gradients of RMSNorm and LayerNorm.
#pragma once

#include "cuda/engine/grad_row.cuh"
#include "ops/norm.h"

namespace jaxnorm::cuda {

struct NormState {
  const float *mean, *rstd;
};

// The scalars of a row, and how x_hat and dx follow from them:
//   x_hat = (x - mean) * rstd,   dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat))     RMSNorm: no mean, no mean(g)
template <Kind KIND>
struct NormScalars {
  static constexpr bool kLayer = KIND == Kind::layer;
  static constexpr int kSums = kLayer ? 2 : 1;
  float mean = 0, rstd = 0;

  __device__ float x_hat(float x) const { return (kLayer ? x - mean : x) * rstd; }

  // What is past the row's end has no part in sums, being multiplied by 0, as long as x_hat is finite there, where x is
  // 0. A mean so large may belong to a row whose numbers are all alike, or rstd is 0: of any deviation from it the
  // square is infinite. So within the row x_hat stays what it is.
  __device__ NormScalars for_sums() const {
    if (!kLayer) return *this;
    return {mean, fabsf(mean) > 1e27f && rstd > 1.0f ? 1.0f : rstd};
  }

  struct Dx {
    float rstd, slope, level;
    __device__ float operator()(float g, float x_hat) const {
      return fmaf(g, rstd, -(kLayer ? fmaf(x_hat, slope, level) : x_hat * slope));
    }
  };
  __device__ Dx dx(const Sums<kSums>& sums, float reciprocal_cols) const {
    return {rstd, sums.value[0] * reciprocal_cols * rstd,
            kLayer ? sums.value[kSums - 1] * reciprocal_cols * rstd : 0.0f};
  }

  // The same from means, of rows in segments: rounded in another order, which they keep.
  template <typename Means>
  __device__ float dx_of_means(float g, float x_hat, const Means& mean_of) const {
    return rstd * fmaf(-x_hat, mean_of.gx, kLayer ? g - mean_of.g : g);
  }
};

// WEIGHTS: how many gradients of weights there may be. DSUM: how dsum is reached, which is added to dx.
template <Kind KIND, typename X_, typename DY_, int WEIGHTS, Extra DSUM>
struct NormGrad : NormState, DxGrad<X_> {
  using DY = DY_;
  using State = NormState;
  using Scalars = NormScalars<KIND>;
  static constexpr int kWeights = WEIGHTS;
  static constexpr Extra kExtra = DSUM;

  __device__ __host__ explicit NormGrad(const State& state) : NormState(state) {}

  __device__ void fetch(int64_t row, Scalars& s) const {
    s.rstd = rstd[row];
    if constexpr (Scalars::kLayer) s.mean = mean[row];
  }
};

}  // namespace jaxnorm::cuda
