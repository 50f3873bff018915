// Exponentials, and tanh.
#pragma once

#include "cpu/engine/vector.h"

namespace jaxnorm::cpu {
namespace {

// Adding this to a number below 2^22 leaves the rounded number in the last bits.
constexpr float kRounding = 0x1.8p23f;
constexpr float kLog2e = 0x1.715476p+0f;
// Below it exp is subnormal, which is 0 to XLA's threads.
constexpr float kLeastExponent = -0x1.5d589ep+6f;

// exp(t) = (rest + 1) * power * 2^p, to about 1 ulp, where `rounding` is kRounding - p; t is at least
// kLeastExponent + p * ln(2), and either p is 0 or |t| is at most 512. A power of two within the exponent costs nothing
// and, other than a subtraction from t, no accuracy.
struct Exp {
  Vec rest, power;

  Exp(Vec t, float rounding = kRounding) {
    // ln 2 in two parts, of which the first is short enough for its product with k to be exact.
    constexpr float kLn2 = 0x1.62e4p-1f, kLn2Rest = 0x1.7f7d1cp-20f;
    const Vec shifted = fma(t, broadcast(kLog2e), broadcast(rounding)), k = shifted - rounding;
    const Vec r = fma(k, broadcast(-kLn2Rest), fma(k, broadcast(-kLn2), t));
    // exp(r) for |r| <= ln(2) / 2 by its series, of which the first term left out is below 2^-27.
    constexpr float kSeries[] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2};
    Vec p = broadcast(1.f / 5040);
    for (const float coefficient : kSeries) p = fma(p, r, broadcast(coefficient));
    rest = fma(p, r * r, r);
    power = (Vec)(((Bits)shifted << 23) + 0x3f800000u);
  }

  Vec value() const { return (rest + 1) * power; }
};

// exp(t) for t up to about 0, also infinite.
Vec exp_of_negative(Vec t) {
  const Vec value = Exp(t).value();
  return t < kLeastExponent ? Vec{} : value;
}

// exp(-|v|)
Vec exp_of_minus_magnitude(Vec v) { return exp_of_negative((Vec)((Bits)v | 0x80000000u)); }

// tanh(v) and its slope 1 - tanh(v)^2, both to a few ulp also where the value is close to 0 and the slope is.
struct Tanh {
  Vec value, slope;

  explicit Tanh(Vec v) {
    const Bits sign = (Bits)v & 0x80000000u;
    const Vec t = (Vec)((Bits)(v + v) | 0x80000000u);
    const Exp exp(t);
    const Vec e = t < kLeastExponent ? Vec{} : exp.value();
    const Vec less_1 = t < kLeastExponent ? broadcast(-1) : fma(exp.rest, exp.power, exp.power - 1);
    const Vec reciprocal = 1 / (less_1 + 2);
    value = (Vec)((Bits)(less_1 * reciprocal) ^ 0x80000000u ^ sign);
    slope = 4 * e * reciprocal * reciprocal;
  }
};

}  // namespace
}  // namespace jaxnorm::cpu
