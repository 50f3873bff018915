// From dtypes, known when a kernel is called, to the types that stand for them when it is compiled.
#pragma once

#include "engine/cpu/vector.h"
#include "operands.h"

namespace jaxnorm::cpu {
namespace {

template <class F>
void with_type(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f32:
      return f(float{});
    case Dtype::f16:
      return f(F16{});
    default:
      return f(BF16{});
  }
}

template <class T>
constexpr Dtype dtype_of = Dtype::f32;
template <>
constexpr Dtype dtype_of<F16> = Dtype::f16;
template <>
constexpr Dtype dtype_of<BF16> = Dtype::bf16;

// Calls f(X{}, Y{}) with the types that stand for a supported pair of dtypes.
template <class F>
void with_types(Dtype x, Dtype y, F f) {
  with_type(x, [&](auto x_type) {
    using X = decltype(x_type);
    with_type(y, [&](auto y_type) {
      using Y = decltype(y_type);
      if constexpr (is_supported(dtype_of<X>, dtype_of<Y>)) f(X{}, Y{});
    });
  });
}

}  // namespace
}  // namespace jaxnorm::cpu
