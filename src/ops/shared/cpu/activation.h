// The activations, and their slopes.
//
//   A::of(v)
//   A::with_slope(v)    both, which loses nothing where sigmoid(v) is close to 0 or 1
//   A::through(d, v)    what passes of a cotangent d, all of it or nothing
#pragma once

#include "ops/shared/activation.h"
#include "ops/shared/cpu/exp.h"

namespace jaxnorm::cpu {
namespace {

struct Activated {
  Vec value, slope;
};

struct PassesAll {
  static Vec through(Vec d, Vec) { return d; }
};

// Nothing passes where v is not positive, an infinity neither.
struct PassesWherePositive {
  static Vec through(Vec d, Vec v) { return v > 0 ? d : broadcast(0); }
};

struct Identity : PassesAll {
  static constexpr Activation kName = Activation::none;

  static Vec of(Vec v) { return v; }
  static Activated with_slope(Vec v) { return {v, broadcast(1)}; }
};

struct Sigmoid : PassesAll {
  static constexpr Activation kName = Activation::sigmoid;

  static Vec of(Vec v) {
    const Vec e = exp_of_minus_magnitude(v);
    return (v < 0 ? e : broadcast(1)) / (1 + e);
  }

  static Activated with_slope(Vec v) {
    const Vec e = exp_of_minus_magnitude(v), larger = 1 / (1 + e), smaller = e * larger;
    return {v < 0 ? smaller : larger, larger * smaller};
  }
};

struct Silu : PassesAll {
  static constexpr Activation kName = Activation::silu;

  static Vec of(Vec v) {
    const Vec e = exp_of_minus_magnitude(v);
    return (v < 0 ? v * e : v) / (1 + e);
  }

  static Activated with_slope(Vec v) {
    const Vec e = exp_of_minus_magnitude(v), larger = 1 / (1 + e), smaller = e * larger;
    const Vec sigmoid = v < 0 ? smaller : larger, value = v * sigmoid;
    return {value, fma(value, v < 0 ? larger : smaller, sigmoid)};
  }
};

// NaN stays as it is.
struct Relu : PassesWherePositive {
  static constexpr Activation kName = Activation::relu;

  static Vec of(Vec v) { return at_least(v, 0); }
  static Activated with_slope(Vec v) { return {of(v), broadcast(1)}; }
};

struct Relu2 : PassesWherePositive {
  static constexpr Activation kName = Activation::relu2;

  static Vec of(Vec v) { return Relu::of(v) * Relu::of(v); }
  static Activated with_slope(Vec v) { return {of(v), v + v}; }
};

// As v * sigmoid(w).
struct Gelu : PassesAll {
  static constexpr Activation kName = Activation::gelu;
  static constexpr float kRoot = 0x1.988454p+0f, kCubic = 0.044715f;  // sqrt(8 / pi)
  static constexpr float kMostSquare = 1e6f;

  static Vec w(Vec v) { return v * fma(v * v, broadcast(kRoot * kCubic), broadcast(kRoot)); }

  static Vec of(Vec v) {
    const Vec e = exp_of_minus_magnitude(w(v));
    return (v < 0 ? v * e : v) / (1 + e);
  }

  static Activated with_slope(Vec v) {
    // What it multiplies is 0 beyond, and would be no number with an infinity.
    const Vec square = v * v > kMostSquare ? broadcast(kMostSquare) : v * v;
    const Vec w_slope = fma(square, broadcast(3 * kRoot * kCubic), broadcast(kRoot));
    const Vec e = exp_of_minus_magnitude(w(v)), larger = 1 / (1 + e), smaller = e * larger;
    const Vec sigmoid = v < 0 ? smaller : larger, value = v * sigmoid;
    return {value, fma(value * (v < 0 ? larger : smaller), w_slope, sigmoid)};
  }
};

struct GeluExact : PassesAll {
  static constexpr Activation kName = Activation::gelu_exact;

  // normal(v), and the density there.
  struct Normal {
    Vec share, density;

    [[gnu::always_inline]] explicit Normal(Vec v) {
      constexpr float kMost = NormalTail::kMost;
      const Vec magnitude = (Vec)((Bits)v & 0x7fffffffu), a = magnitude > kMost ? broadcast(kMost) : magnitude;
      const Vec e = Exp(a * a * -0.5f).value(), t = 1 / fma(a, broadcast(NormalTail::kSlowness), broadcast(1));
      using P = NormalTail;
      constexpr float kOthers[] = {P::k7, P::k6, P::k5, P::k4, P::k3, P::k2, P::k1, P::k0};
      Vec p = broadcast(P::k8);
      for (const float coefficient : kOthers) p = fma(p, t, broadcast(coefficient));
      const Vec tail = e * (p * t);
      share = v < 0 ? tail : 1 - tail;
      density = e * NormalTail::kDensity;
    }
  };

  static Vec of(Vec v) { return v * Normal(v).share; }

  static Activated with_slope(Vec v) {
    const Normal normal(v);
    return {v * normal.share, fma(v, normal.density, normal.share)};
  }
};

// d times the slope at v.
template <class A>
Vec sloped(Vec d, Vec v) {
  return A::through(d * A::with_slope(v).slope, v);
}

// Calls f(A{}) with the type that stands for the activation, which is one of these.
template <class... A, class F>
void with_one_of(Activation activation, F f) {
  ((activation == A::kName && (f(A{}), true)) || ...);
}

}  // namespace
}  // namespace jaxnorm::cpu
