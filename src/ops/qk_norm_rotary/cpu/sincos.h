// Sine and cosine of float32 angles to about 1 ulp, however large.
#pragma once

#include "engine/cpu/vector.h"

namespace jaxnorm::cpu {
namespace {

typedef double Wide __attribute__((vector_size(8 * W)));
typedef int64_t WideInts __attribute__((vector_size(8 * W)));

struct SinCos {
  Vec sin, cos;
};

// Those of one lane after the other, by the C library, which reduces any angle exactly.
SinCos sincos_by_lane(Vec angle) {
  SinCos result;
  for (int i = 0; i < W; ++i) {
    result.sin[i] = static_cast<float>(__builtin_sin(angle[i]));
    result.cos[i] = static_cast<float>(__builtin_cos(angle[i]));
  }
  return result;
}

// In float64, so that the reduction to [-pi/4, pi/4] loses nothing. Pi/2 is in two parts, of which the first has 33
// bits: its product with a quadrant below 2^20 is exact.
SinCos sincos_of(Vec angle) {
  constexpr float kLargest = 1 << 20;
  const Bits magnitude = (Bits)angle & 0x7fffffffu, most = (Bits)broadcast(kLargest);
  const auto are_large = magnitude > most;
  for (int i = 0; i < W; ++i)
    if (are_large[i]) return sincos_by_lane(angle);

  constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1, kHalfPi = 0x1.921fb544p0, kHalfPiRest = 0x1.0b4611a626331p-34;
  constexpr double kShift = 0x1.8p52;  // adding it leaves the rounded number in the last bits
  const Wide a = __builtin_convertvector(angle, Wide);
  const Wide shifted = a * kTwoOverPi + kShift, quadrant = shifted - kShift;
  const Wide r = (a - quadrant * kHalfPi) - quadrant * kHalfPiRest, r2 = r * r;
  // The series, of which the first terms left out are below 2^-37.
  constexpr double kSin[] = {1. / 362880, -1. / 5040, 1. / 120, -1. / 6};
  constexpr double kCos[] = {-1. / 3628800, 1. / 40320, -1. / 720, 1. / 24, -1. / 2};
  Wide s = Wide{} - 1. / 39916800, c = Wide{} + 1. / 479001600;
  for (const double coefficient : kSin) s = s * r2 + coefficient;
  for (const double coefficient : kCos) c = c * r2 + coefficient;
  s = s * r2 * r + r;
  c = c * r2 + 1;
  const Vec sin_r = __builtin_convertvector(s, Vec), cos_r = __builtin_convertvector(c, Vec);

  const Bits turns = __builtin_convertvector((WideInts)shifted, Bits);
  const auto is_odd = (turns & 1) != 0;
  const Bits sin_sign = (turns & 2) << 30, cos_sign = ((turns + 1) & 2) << 30;
  return {(Vec)((Bits)(is_odd ? cos_r : sin_r) ^ sin_sign), (Vec)((Bits)(is_odd ? sin_r : cos_r) ^ cos_sign)};
}

}  // namespace
}  // namespace jaxnorm::cpu
