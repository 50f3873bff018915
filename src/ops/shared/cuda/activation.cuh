// Activations, of values of a type X that their arithmetic is exact enough for: two instructions of the special
// function unit each.
//
//   A::of<X>(v)
//   A::with_slope<X>(v)   both
//   A::through(d, v)      what passes of a cotangent d, all of it or nothing
#pragma once

#include "engine/cuda/vector.cuh"
#include "ops/shared/activation.h"

namespace jaxnorm::cuda {

struct Logistic {
  float value, complement;  // which is 1 - value
};

template <typename X>
constexpr bool kIsHalf = sizeof(X) < 4;

// exp(t) for values of X: to about a unit in the last place of f32, and of half types, whose rounding hides the rest,
// as the estimate gives it.
template <typename X>
__device__ float exp_for(float t) {
  const float exponent = t * 1.44269504f, estimate = exp2_estimate(exponent);  // log2(e)
  if constexpr (kIsHalf<X>) return estimate;
  // What rounding took from the exponent, as a power of e. ln(2) in two parts.
  return fmaf(estimate, fmaf(exponent, 1.90465429e-9f, fmaf(exponent, -0.693147182f, t)), estimate);
}

// sigmoid(v) = 1 / (1 + exp(-v)) for values of X, to a unit more. What would be below 2^-126 is 0.
template <typename X>
__device__ Logistic sigmoid(float v) {
  if constexpr (kIsHalf<X>) {
    const float value = reciprocal_estimate(1.0f + exp_for<X>(-v));
    return {value, 1.0f - value};
  } else {
    // Of the bounds it is 0 and 1, and their exponentials are finite.
    const float bounded = v < -88.0f ? -88.0f : v > 128.0f ? 128.0f : v;
    const float exponential = exp_for<X>(-bounded), value = reciprocal(1.0f + exponential);
    return {value, exponential * value};
  }
}

template <typename X>
__device__ float activate(Activation activation, float v) {
  const float value = sigmoid<X>(v).value;
  return activation == Activation::silu ? v * value : value;
}

// activation(v) and its derivative.
struct Activated {
  float value, slope;
};

template <typename X>
__device__ Activated activate_with_slope(Activation activation, float v) {
  const Logistic s = sigmoid<X>(v);
  const bool silu = activation == Activation::silu;
  const float value = silu ? v * s.value : s.value;
  return {value, fmaf(value, s.complement, silu ? s.value : 0.0f)};
}

struct PassesAll {
  __device__ static float through(float d, float) { return d; }
};

// Nothing passes where v is not positive, an infinity neither.
struct PassesWherePositive {
  __device__ static float through(float d, float v) { return v > 0.0f ? d : 0.0f; }
};

struct Identity : PassesAll {
  static constexpr Activation kName = Activation::none;

  template <typename X>
  __device__ static float of(float v) {
    return v;
  }
  template <typename X>
  __device__ static Activated with_slope(float v) {
    return {v, 1.0f};
  }
};

// Of one that `activate` knows.
template <Activation NAME>
struct OfSigmoid : PassesAll {
  static constexpr Activation kName = NAME;

  template <typename X>
  __device__ static float of(float v) {
    return activate<X>(NAME, v);
  }
  template <typename X>
  __device__ static Activated with_slope(float v) {
    return activate_with_slope<X>(NAME, v);
  }
};
using Silu = OfSigmoid<Activation::silu>;
using Sigmoid = OfSigmoid<Activation::sigmoid>;

// NaN stays as it is.
struct Relu : PassesWherePositive {
  static constexpr Activation kName = Activation::relu;

  template <typename X>
  __device__ static float of(float v) {
    return v < 0.0f ? 0.0f : v;
  }
  template <typename X>
  __device__ static Activated with_slope(float v) {
    return {of<X>(v), 1.0f};
  }
};

struct Relu2 : PassesWherePositive {
  static constexpr Activation kName = Activation::relu2;

  template <typename X>
  __device__ static float of(float v) {
    const float value = Relu::of<X>(v);
    return value * value;
  }
  template <typename X>
  __device__ static Activated with_slope(float v) {
    return {of<X>(v), v + v};
  }
};

// v * sigmoid(w)
struct Gelu : PassesAll {
  static constexpr Activation kName = Activation::gelu;
  static constexpr float kRoot = 1.59576912f, kCubic = 0.0713548163f;  // sqrt(8 / pi), and 0.044715 of it

  template <typename X>
  __device__ static Logistic sigmoid_of(float v, float square) {
    return sigmoid<X>(v * fmaf(square, kCubic, kRoot));
  }
  template <typename X>
  __device__ static float of(float v) {
    return v * sigmoid_of<X>(v, v * v).value;
  }
  template <typename X>
  __device__ static Activated with_slope(float v) {
    const float square = v * v;
    const Logistic s = sigmoid_of<X>(v, square);
    // What it multiplies is 0 beyond, and would be no number with an infinity.
    const float w_slope = fmaf(square > 1e6f ? 1e6f : square, 3.0f * kCubic, kRoot);
    return {v * s.value, fmaf(v * (s.value * s.complement), w_slope, s.value)};
  }
};

struct GeluExact : PassesAll {
  static constexpr Activation kName = Activation::gelu_exact;

  // normal(v), and the density there.
  struct Normal {
    float share, density;
  };

  template <typename X>
  __device__ static Normal normal(float v) {
    const float a = fminf(fabsf(v), NormalTail::kMost), scale = fmaf(a, NormalTail::kSlowness, 1.0f);
    const float t = kIsHalf<X> ? reciprocal_estimate(scale) : reciprocal(scale);
    const float e = exp_for<X>(a * a * -0.5f);
    using P = NormalTail;
    float p = P::k8;
#pragma unroll
    for (const float coefficient : {P::k7, P::k6, P::k5, P::k4, P::k3, P::k2, P::k1, P::k0})
      p = fmaf(p, t, coefficient);
    const float tail = e * (p * t);
    return {v < 0.0f ? tail : 1.0f - tail, e * NormalTail::kDensity};
  }
  template <typename X>
  __device__ static float of(float v) {
    return v * normal<X>(v).share;
  }
  template <typename X>
  __device__ static Activated with_slope(float v) {
    const Normal n = normal<X>(v);
    return {v * n.share, fmaf(v, n.density, n.share)};
  }
};

// d times the slope at v.
template <typename A, typename X>
__device__ float sloped(float d, float v) {
  return A::through(d * A::template with_slope<X>(v).slope, v);
}

}  // namespace jaxnorm::cuda
