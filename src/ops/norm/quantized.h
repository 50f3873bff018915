// The norm with a result of 8 bits, of x or of a sum. y, in f32, is quantised with each operation rounded to f32:
//
//   v = y * smooth                                                  (y itself where there is no smooth)
//   scale = given, or over each `group` neighbouring columns of a row
//           amax = max |v|,  1 if that is 0, else min(max(amax / largest_of(dtype), 2^-126), max_scale),
//           with power_of_two rounded up to a power of two before it is bounded
//   values = v * (1 / scale), clipped to +-largest_of(dtype), rounded to nearest even
//
// A NaN makes the scale of its group NaN, and is 0 as an s8. Where it is wanted, y is written as well, rounded.
#pragma once

#include "ops/norm/call.h"
#include "ops/norm/gated.h"

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
};

struct QuantizedNormForward : NormOperands, AddFirst {
  Quantization quantized;
  Output y;  // null where it is not wanted
};

struct ScaledAddQuantizedNormForward : QuantizedNormForward {
  Input branch_scale;  // as of ScaledAddNormForward, with rows of its own
  RowMap branch_rows;
};

inline Addition addition_of(const ScaledAddQuantizedNormForward& p) {
  return {p.x, p.addend, p.sum, p.branch_scale, p.branch_rows};
}

// The two ops that do the same, where no kernel has all of it.
inline NormForward norm_of(const QuantizedNormForward& p) {
  NormForward norm{};
  static_cast<NormOperands&>(norm) = p;
  norm.mean = norm.rstd = nullptr;
  norm.y = p.y;
  norm.y_stride = p.cols;
  norm.multiply_before_cast = true;
  return norm;
}

inline QuantizedNormForward without_y(QuantizedNormForward p) {
  p.y = {};
  return p;
}

// Gated RMSNorm with such a result: y of gated.h, in f32 and never stored, of rows of up to kGatedCols, without a bias
// or an addend. smooth has a row for each of scale's.
struct GatedNormQuantizedForward : QuantizedNormForward, Gated {};

}  // namespace jaxnorm
