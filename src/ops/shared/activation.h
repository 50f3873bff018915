// The activations that ops share:
//
//   silu(v) = v * sigmoid(v)
//   relu(v) = max(v, 0), whose slope at 0 is 0, and relu2 its square
//   gelu(v) = v * sigmoid(sqrt(8 / pi) * (v + 0.044715 * v³)), the approximation by tanh
//   gelu_exact(v) = v * normal(v), the share of the normal distribution below v
#pragma once

#include <cstdint>

namespace jaxnorm {

enum class Activation : uint8_t { none, silu, sigmoid, relu, relu2, gelu, gelu_exact };

inline constexpr const char* kActivationNames[] = {"none", "silu", "sigmoid", "relu", "relu2", "gelu", "gelu_exact"};

constexpr const char* name_of(Activation activation) { return kActivationNames[static_cast<int>(activation)]; }

// normal(-a) for a >= 0: exp(-a² / 2) * t * p(t), t = 1 / (1 + a * kSlowness). The polynomial is the closest of its
// degree, to 2^-24 of the product for a <= 14, where that is 0 in f32.
struct NormalTail {
  static constexpr float kMost = 16, kSlowness = 0x1.666666p-2f, kDensity = 0x1.988454p-2f;  // 1 / sqrt(2 pi)
  static constexpr float k8 = -0x1.ddb8f2p-6f, k7 = 0x1.26f9ap-3f, k6 = -0x1.05fa9cp-2f, k5 = 0x1.46494ap-3f,
                         k4 = -0x1.7c4f18p-6f, k3 = 0x1.b057c4p-4f, k2 = 0x1.eac9bep-4f, k1 = 0x1.1e70c4p-3f,
                         k0 = 0x1.1df1c6p-3f;
};

}  // namespace jaxnorm
