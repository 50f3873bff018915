// Quantising: how float32 becomes 8 bits, and the scale of a group of values.
//
// Everything is done in integers that float arithmetic could lose: XLA's threads flush subnormals to zero, and a NaN
// does not survive every instruction that takes a maximum.
#pragma once

#include "engine/cpu/columns.h"
#include "ops/shared/quantization.h"

namespace jaxnorm::cpu {
namespace {

typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef int32_t Ints4 __attribute__((vector_size(16)));

// Eight bits of which `mantissa` are a mantissa and, below the sign, the rest an exponent.
struct F8E4M3FN {
  static constexpr Dtype dtype = Dtype::f8e4m3fn;
  static constexpr int mantissa = 3, bias = 7, nan = 0x7f;
};
struct F8E5M2 {
  static constexpr Dtype dtype = Dtype::f8e5m2;
  static constexpr int mantissa = 2, bias = 15, nan = 0x7e;
};
struct S8 {
  static constexpr Dtype dtype = Dtype::s8;
};

template <class F>
void with_quantized_type(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f8e4m3fn:
      return f(F8E4M3FN{});
    case Dtype::f8e5m2:
      return f(F8E5M2{});
    default:
      return f(S8{});
  }
}

constexpr uint32_t kInfinity = 0x7f800000, kMagnitude = 0x7fffffff;

uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Magnitudes compare as signed integers do, NaN above infinity.
Ints magnitude(Vec v) { return (Ints)((Bits)v & kMagnitude); }
Ints min(Ints a, Ints b) { return a < b ? a : b; }
Ints max(Ints a, Ints b) { return a > b ? a : b; }
Ints all(uint32_t value) { return Ints{} + static_cast<int32_t>(value); }

// In the low byte of each lane: v clipped to the largest value, to nearest even.
template <class Q>
Bits codes(Vec v, Q) {
  constexpr int kDropped = 23 - Q::mantissa;
  constexpr int kRebias = (127 - Q::bias) << 23, kSmallestNormal = kRebias + (1 << 23);
  // Adding it leaves the rounded subnormal in the last bits.
  constexpr int kShift = (127 + 1 - Q::bias + kDropped) << 23;
  const Ints exact = magnitude(v), clipped = min(exact, all(bits_of(largest_of(Q::dtype))));
  const Ints normal = (clipped - kRebias + ((1 << (kDropped - 1)) - 1) + ((clipped >> kDropped) & 1)) >> kDropped;
  const Ints subnormal = (Ints)((Vec)clipped + (Vec)all(kShift)) - kShift;
  const Ints finite = clipped < all(kSmallestNormal) ? subnormal : normal;
  const Ints code = exact > all(kInfinity) ? all(Q::nan) : finite;
  return (Bits)code | ((Bits)v >> 31) << 7;
}

Bits codes(Vec v, S8) {
  const Ints exact = magnitude(v), clipped = min(exact, all(bits_of(largest_of(Dtype::s8))));
  const Ints number = exact > all(kInfinity) ? Ints{} : clipped | (Ints)((Bits)v & ~kMagnitude);
  const Ints shift = all(bits_of(0x1.8p23f));  // adding it leaves the rounded number in the last bits
  return (Bits)((Vec)number + (Vec)shift);
}

template <class Q>
void store_codes(uint8_t* p, Vec v, Q, Whole) {
  const Bytes bytes = low_bytes(codes(v, Q{}));
  memcpy(p, &bytes, sizeof bytes);
}

template <class Q>
void store_codes(uint8_t* p, Vec v, Q, Part part) {
  uint8_t lanes[W];
  store_codes(lanes, v, Q{}, Whole{});
  memcpy(p, lanes, part.count);
}

int32_t max_of_lanes(Ints lanes) {
  Ints4 parts[W / 4];
  memcpy(parts, &lanes, sizeof lanes);
  for (int i = 1; i < W / 4; ++i) parts[0] = parts[i] > parts[0] ? parts[i] : parts[0];
  int32_t largest = parts[0][0];
  for (int i = 1; i < 4; ++i) largest = parts[0][i] > largest ? parts[0][i] : largest;
  return largest;
}

// The largest magnitude among `cols` values, or NaN where one is.
template <class Values>
float largest_magnitude(int64_t cols, Values values) {
  Ints largest = {};
  for_each_vector(cols, [&](int64_t column, auto extent) {
    largest = max(largest, magnitude(within(values(column, extent), extent)));
  });
  return float_of(max_of_lanes(largest));
}

// The smallest power of two that is not below a positive value.
float power_of_two_above(float value) {
  const uint32_t bits = bits_of(value);
  return bits >= kInfinity ? value : float_of((bits + 0x7fffff) & kInfinity);
}

float scale_of(const Quantization& q, float amax) {
  if (amax == 0) return 1;
  float scale = amax / largest_of(q.values.dtype);
  if (q.power_of_two) scale = power_of_two_above(scale);
  if (scale < kSmallestScale) scale = kSmallestScale;
  return scale > q.max_scale ? q.max_scale : scale;
}

// Quantises the group of columns from `begin` on. The values are computed for the largest magnitude, by first(column,
// extent), and from the cache again to be written, by last(column, extent), so that no row of float32 is kept anywhere.
template <class Q, class First, class Last>
void quantize(const Quantization& q, int64_t row, int64_t cols, int64_t begin, First first, Last last, Q) {
  float scale;
  if (q.given) {
    scale = *q.given;
  } else {
    scale = scale_of(
        q, largest_magnitude(q.group, [&](int64_t column, auto extent) { return first(begin + column, extent); }));
    q.scales[(row * cols + begin) / q.group] = scale;
  }
  const float inverse = 1 / scale;
  uint8_t* const values = static_cast<uint8_t*>(q.values.data) + row * cols + begin;
  for_each_vector(q.group, [&](int64_t column, auto extent) {
    store_codes(values + column, last(begin + column, extent) * inverse, Q{}, extent);
  });
}

}  // namespace
}  // namespace jaxnorm::cpu
