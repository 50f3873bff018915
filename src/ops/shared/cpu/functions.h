// Exponentials, tanh, and the activations and their slopes. An activation has
//
//   A::of(v)
//   A::with_slope(v)    both, which loses nothing where sigmoid(v) is close to 0 or 1
//   A::through(d, v)    what passes of a cotangent d, all of it or nothing
#pragma once

#include "engine/cpu/vector.h"
#include "ops/shared/activation.h"

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
