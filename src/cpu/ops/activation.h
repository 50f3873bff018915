// The activations, and their slopes.
#pragma once

#include "cpu/engine/vector.h"

namespace jaxnorm::cpu {
namespace {

// exp(-|v|) to about 1 ulp; 0 where that is subnormal, as it is to XLA's threads.
Vec exp_of_minus_magnitude(Vec v) {
  // ln 2 in two parts, of which the first is short enough for its product with k to be exact.
  constexpr float kLog2e = 0x1.715476p+0f, kLn2 = 0x1.62e4p-1f, kLn2Rest = 0x1.7f7d1cp-20f;
  constexpr float kShift = 0x1.8p23f;  // adding it leaves the rounded number in the last bits
  constexpr float kLeast = -0x1.5d589ep+6f;
  const Vec t = (Vec)((Bits)v | 0x80000000u);
  const Vec shifted = fma(t, broadcast(kLog2e), broadcast(kShift)), k = shifted - kShift;
  const Vec r = fma(k, broadcast(-kLn2Rest), fma(k, broadcast(-kLn2), t));
  // exp(r) for |r| <= ln(2) / 2 by its series, of which the first term left out is below 2^-27.
  constexpr float kSeries[] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2};
  Vec p = broadcast(1.f / 5040);
  for (const float coefficient : kSeries) p = fma(p, r, broadcast(coefficient));
  const Vec exp_r = fma(p, r * r, r) + 1;
  const Vec power = (Vec)(((Bits)shifted << 23) + 0x3f800000u);
  return t < kLeast ? Vec{} : exp_r * power;
}

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
};

}  // namespace
}  // namespace jaxnorm::cpu
