// The activations, and their slopes: sloped(d, v) is d times the slope at v.
#pragma once

#include "ops/shared/cpu/exp.h"

namespace jaxnorm::cpu {
namespace {

struct Activated {
  Vec value, slope;
};

// of(v) loses nothing where sigmoid(v) is close to 0, and slope nothing where it is close to 1.
struct Sigmoid {
  static Vec of(Vec v) {
    const Vec e = exp_of_minus_magnitude(v);
    return (v < 0 ? e : broadcast(1)) / (1 + e);
  }

  static Activated with_slope(Vec v) {
    const Vec e = exp_of_minus_magnitude(v), larger = 1 / (1 + e), smaller = e * larger;
    return {v < 0 ? smaller : larger, larger * smaller};
  }
};

struct Silu {
  static Vec of(Vec v) {
    const Vec e = exp_of_minus_magnitude(v);
    return (v < 0 ? v * e : v) / (1 + e);
  }

  static Activated with_slope(Vec v) {
    const Vec e = exp_of_minus_magnitude(v), larger = 1 / (1 + e), smaller = e * larger;
    const Vec sigmoid = v < 0 ? smaller : larger, value = v * sigmoid;
    return {value, fma(value, v < 0 ? larger : smaller, sigmoid)};
  }

  static Vec sloped(Vec d, Vec v) { return d * with_slope(v).slope; }
};

struct Identity {
  static Vec of(Vec v) { return v; }
  static Vec sloped(Vec d, Vec) { return d; }
};

// NaN stays as it is.
struct Relu {
  static Vec of(Vec v) { return at_least(v, 0); }
  // Nothing passes where v is not positive, an infinity neither.
  static Vec sloped(Vec d, Vec v) { return v > 0 ? d : broadcast(0); }
};

// The approximation by tanh, as v * sigmoid(w).
struct Gelu {
  static constexpr float kRoot = 0x1.988454p+0f, kCubic = 0.044715f;  // sqrt(8 / pi)

  static Vec w(Vec v) { return v * fma(v * v, broadcast(kRoot * kCubic), broadcast(kRoot)); }

  static Vec of(Vec v) {
    const Vec e = exp_of_minus_magnitude(w(v));
    return (v < 0 ? v * e : v) / (1 + e);
  }

  static Activated with_slope(Vec v) {
    const Vec w_slope = fma(v * v, broadcast(3 * kRoot * kCubic), broadcast(kRoot));
    const Vec e = exp_of_minus_magnitude(w(v)), larger = 1 / (1 + e), smaller = e * larger;
    const Vec sigmoid = v < 0 ? smaller : larger, value = v * sigmoid;
    return {value, fma(value * (v < 0 ? larger : smaller), w_slope, sigmoid)};
  }

  static Vec sloped(Vec d, Vec v) { return d * with_slope(v).slope; }
};

}  // namespace
}  // namespace jaxnorm::cpu
