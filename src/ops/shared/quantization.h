// Results of 8 bits. y, in f32, is quantised with each operation rounded to f32:
//
//   v = y * smooth                                                  (y itself where there is no smooth)
//   scale = given, or over each `group` neighbouring columns of a row
//           amax = max |v|,  1 if that is 0, else min(max(amax / largest_of(dtype), 2^-126), max_scale),
//           with power_of_two rounded up to a power of two before it is bounded
//   values = v * (1 / scale), clipped to +-largest_of(dtype), rounded to nearest even
//
// A NaN makes the scale of its group NaN, and is 0 as an s8.
#pragma once

#include "operands.h"

namespace jaxnorm {

// The largest value of a dtype that results are quantised to. The smallest is its negative, for s8 too.
constexpr float largest_of(Dtype dtype) {
  return dtype == Dtype::f8e4m3fn ? 448.0f : dtype == Dtype::f8e5m2 ? 57344.0f : 127.0f;
}

// The smallest scale: the least float whose reciprocal is finite and that no platform takes for zero.
constexpr float kSmallestScale = 0x1p-126f;

// How many neighbouring columns may share a scale, unless a whole row does.
constexpr int64_t kGroups[] = {32, 64, 128};

struct Quantization {
  Output values;
  float* scales = nullptr;       // rows * (cols / group) values; null where the scale is given
  const float* given = nullptr;  // one value
  Input smooth;                  // cols factors
  int64_t group = 0;             // one of kGroups; or cols, for one scale a row
  float max_scale = 0;           // infinity: unbounded
  bool power_of_two = false;
  float of_zeros = 1;  // the scale that is written for nothing but zeros
};

}  // namespace jaxnorm
