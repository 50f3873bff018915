// The activations, and their slopes.
#pragma once

#include "cpu/ops/exp.h"

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
};

}  // namespace
}  // namespace jaxnorm::cpu
