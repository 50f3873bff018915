// How a logit z follows from x, see ops/logits.h. t is x, or with a soft cap z; w is t * factor, and a logit's distance
// from the largest one (w - max(w)) * unit.
#pragma once

#include "ops/shared/cuda/exponential.cuh"
#include "ops/shared/cuda/soft_cap.cuh"
#include "ops/shared/logits.h"

namespace jaxnorm::cuda {

struct LogitScale {
  float of_cap;     // what tanh is taken of is x * of_cap
  float cap;        // 0: there is no soft cap
  float factor;     // of w
  float unit;       // not 0, as columns that do not count have a w of -inf
  float log2_unit;  // unit * log2(e)
  bool descending;  // whether w falls where x grows
  bool wants_log;   // whether the logarithm of the sum of exponentials is wanted, and not the sum
  bool with_total;

  LogitScale(const Scale& scale, float soft_cap, bool wants_log, bool with_total)
      : of_cap(soft_cap == 0 ? 0 : scale.whole / soft_cap),
        cap(soft_cap),
        factor(soft_cap != 0 ? 1.0f : scale.power),
        unit(soft_cap != 0 ? 1.0f : std::fmax(scale.unit, FLT_TRUE_MIN)),
        log2_unit(static_cast<float>(unit * 1.4426950408889634)),
        descending(scale.whole < 0),
        wants_log(wants_log),
        with_total(with_total) {}

  // 2^(the distance from `max` in w).
  __device__ float exponential(float t, float max) const { return exp2_estimate(fmaf(t, factor, -max) * log2_unit); }
  // By what a sum has to be multiplied that was made with the maximum `from`.
  __device__ float between(float from, float to) const { return exp2_estimate((from - to) * log2_unit); }

  template <typename X>
  __device__ float t_of(float x) const {
    return cap == 0 ? x : tanh_of<X>(x * of_cap).value * cap;
  }
};

}  // namespace jaxnorm::cuda
