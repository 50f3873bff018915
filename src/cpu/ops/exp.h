// Exponentials, and tanh.
#pragma once

#include "cpu/engine/vector.h"

namespace jaxnorm::cpu {
namespace {

constexpr float kLog2e = 0x1.715476p+0f, kLn2 = 0x1.62e43p-1f;

// exp(t) / 2^p to about 1 ulp, in parts: (rest + 1) * 2^k, where `rounding` is kRounding - p and `least` that of p:
// a power of two within the exponent costs nothing and, other than a subtraction from t, no accuracy. t is at most
// about p * ln(2), and either p is 0 or |t| is at most 512 where that is not far below p * ln(2). A result that is
// subnormal may be 0, as it is to XLA's threads.
struct Exp {
  Vec rest, shifted;  // shifted: k + kRounding

  static constexpr float least(float p) { return (p + kLeastPower) * kLn2; }

  [[gnu::always_inline]] Exp(Vec t, float rounding = kRounding, float least = Exp::least(0)) {
    // ln 2 in two parts, of which the first is short enough for its product with k to be exact.
    constexpr float kShortLn2 = 0x1.62e4p-1f, kLn2Rest = 0x1.7f7d1cp-20f;
    t = at_least(t, least);
    shifted = fma(t, broadcast(kLog2e), broadcast(rounding));
    const Vec whole = shifted - rounding;
    const Vec r = fma(whole, broadcast(-kLn2Rest), fma(whole, broadcast(-kShortLn2), t));
    // The polynomial of this degree that is closest to exp(r) for |r| <= ln(2) / 2, to 2^-28 of it.
    constexpr float kCoefficients[] = {0x1.123988p-7f, 0x1.5558bp-5f, 0x1.555492p-3f, 0x1.fffffcp-2f};
    Vec p = broadcast(0x1.6a4ce4p-10f);
    for (const float coefficient : kCoefficients) p = fma(p, r, broadcast(coefficient));
    rest = fma(p, r * r, r);
  }

  Vec value() const { return times_power(rest + 1); }
  // v * 2^k
  Vec times_power(Vec v) const { return cpu::times_power(v, shifted); }
};

// exp(-|v|)
[[gnu::always_inline]] inline Vec exp_of_minus_magnitude(Vec v) { return Exp((Vec)((Bits)v | 0x80000000u)).value(); }

// tanh(v) and its slope 1 - tanh(v)^2, both to a few ulp also where the value is close to 0 and the slope is.
struct Tanh {
  Vec value, slope;

  [[gnu::always_inline]] explicit Tanh(Vec v) {
    const Bits sign = (Bits)v & 0x80000000u;
    const Exp exp((Vec)((Bits)(v + v) | 0x80000000u));
    const Vec power = exp.times_power(broadcast(1)), less_1 = fma(exp.rest, power, power - 1);
    const Vec reciprocal = 1 / (less_1 + 2);
    value = (Vec)((Bits)(less_1 * reciprocal) ^ 0x80000000u ^ sign);
    slope = 4 * exp.value() * reciprocal * reciprocal;
  }
};

}  // namespace
}  // namespace jaxnorm::cpu
