// Exponentials, and tanh.
#pragma once

#include "engine/cpu/vector.h"

namespace jaxnorm::cpu {
namespace {

constexpr float kLog2e = 0x1.715476p+0f, kLn2 = 0x1.62e43p-1f;

// exp(t) to about 1 ulp, in parts: (rest + 1) * 2^k. A result that is subnormal may be 0, as it is to XLA's threads.
struct Exp {
  Vec rest, shifted;  // shifted: k + kRounding

  static constexpr float kLeast = kLeastPower * kLn2;

  [[gnu::always_inline]] explicit Exp(Vec t) {
    // ln 2 in two parts, of which the first is short enough for its product with k to be exact.
    constexpr float kShortLn2 = 0x1.62e4p-1f, kLn2Rest = 0x1.7f7d1cp-20f;
    t = at_least(t, kLeast);
    shifted = fma(t, broadcast(kLog2e), broadcast(kRounding));
    const Vec whole = shifted - kRounding;
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

// exp(t) to about 2 ulp.
#if defined(__AVX512F__)

// A table of the powers of two between 1 and 2 leaves less to the polynomial, whose operations are all that counts.
[[gnu::always_inline]] inline Vec exp(Vec t) {
  constexpr float kTable[W] = {0x1p+0f,        0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f,
                               0x1.306fep+0f,  0x1.3dea64p+0f, 0x1.4bfdaep+0f, 0x1.5ab07ep+0f,
                               0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f,
                               0x1.ae89fap+0f, 0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f};
  constexpr float kRounding16 = 0x1.8p19f;  // adding this leaves the number of sixteenths in the last bits
  t = at_least(t, Exp::kLeast);
  const Vec shifted = fma(t, broadcast(kLog2e), broadcast(kRounding16)), whole = shifted - kRounding16;
  const Vec r = fma(whole, broadcast(-kLn2), t), power = lookup(kTable, (Bits)shifted);
  const Vec rest = fma(fma(r, broadcast(1.f / 6), broadcast(0.5f)), r * r, r);
  return times_floor_power(fma(power, rest, power), whole);
}

#else

[[gnu::always_inline]] inline Vec exp(Vec t) { return Exp(t).value(); }

#endif

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
