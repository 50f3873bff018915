// The gradients of RMSNorm and LayerNorm.
#pragma once

#include "ops/norm/call.h"
#include "ops/norm/cuda/grad_row.cuh"

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

  // Past the row's end x is 0, and x_hat need not be: of an infinite rstd, or of a large mean, it is not finite.
  __device__ NormScalars within(int remaining) const { return {mean, remaining > 0 ? rstd : 0.0f}; }

  // rstd comes last, as in the formula: it may be infinite, and two infinite terms have no difference.
  struct Dx {
    float rstd, mean_gx, mean_g;
    __device__ float operator()(float g, float x_hat) const {
      return rstd * fmaf(-x_hat, mean_gx, kLayer ? g - mean_g : g);
    }
  };
  __device__ Dx dx(const Sums<kSums>& sums, float reciprocal_cols) const {
    return {rstd, sums.value[0] * reciprocal_cols, kLayer ? sums.value[kSums - 1] * reciprocal_cols : 0.0f};
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
