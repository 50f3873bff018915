// Quantising the y that a thread group's threads have in registers: the arithmetic of `Quantization`, each operation
// rounded as it stands there. The divisions are exact ones, so a group's are done by one thread, or few.
#pragma once

#include <cuda_fp8.h>

#include "engine/cuda/fragment.cuh"
#include "ops/shared/quantization.h"

namespace jaxnorm::cuda {

template <Dtype DTYPE>
constexpr float kLargest = largest_of(DTYPE);

__device__ inline float scale_of(const Quantization& q, float amax) {
  constexpr float e4m3 = kLargest<Dtype::f8e4m3fn>, e5m2 = kLargest<Dtype::f8e5m2>, s8 = kLargest<Dtype::s8>;
  const auto choose = [&](float a, float b, float c) {
    return q.values.dtype == Dtype::f8e4m3fn ? a : q.values.dtype == Dtype::f8e5m2 ? b : c;
  };
  // A division in three operations: from the rounded reciprocal one correction leads to the rounded quotient, as long
  // as that is not subnormal (Markstein 1990).
  const float largest = choose(e4m3, e5m2, s8), reciprocal = choose(1 / e4m3, 1 / e5m2, 1 / s8);
  const float quotient = amax * reciprocal;
  float scale = fmaf(fmaf(-quotient, largest, amax), reciprocal, quotient);
  if (amax == INFINITY) scale = amax;
  // One more than the bits below the exponent can hold carries into it.
  if (q.power_of_two) scale = __uint_as_float((__float_as_uint(scale) + 0x007fffffu) & 0x7f800000u);
  scale = fminf(fmaxf(scale, 0x1p-126f), q.max_scale);
  if (amax == 0.0f) scale = 1.0f;
  return amax != amax ? amax : scale;
}

// Calls f with the dtype that values are of as a constant.
template <typename F>
__device__ void with_quantized(Dtype dtype, F f) {
  if (dtype == Dtype::f8e4m3fn) {
    f(std::integral_constant<Dtype, Dtype::f8e4m3fn>{});
  } else if (dtype == Dtype::f8e5m2) {
    f(std::integral_constant<Dtype, Dtype::f8e5m2>{});
  } else {
    f(std::integral_constant<Dtype, Dtype::s8>{});
  }
}

// Four values, clipped and rounded, the first in the lowest byte.
template <Dtype DTYPE>
__device__ uint32_t pack_four(float a, float b, float c, float d) {
  if constexpr (DTYPE == Dtype::s8) {
    return pack_s8(a, b, c, d);
  } else {
    constexpr auto kFormat = DTYPE == Dtype::f8e4m3fn ? __NV_E4M3 : __NV_E5M2;
    const uint32_t lower = __nv_cvt_float2_to_fp8x2(float2{a, b}, __NV_SATFINITE, kFormat);
    const uint32_t upper = __nv_cvt_float2_to_fp8x2(float2{c, d}, __NV_SATFINITE, kFormat);
    return lower | upper << 16;
  }
}

template <Dtype DTYPE, int N>
__device__ Packed<uint8_t, N> pack_quantized(const float (&v)[N]) {
  Packed<uint8_t, N> packed;
  if constexpr (N == 1) {
    packed.element = static_cast<uint8_t>(pack_four<DTYPE>(v[0], 0, 0, 0));
  } else {
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
      packed.word[i] = pack_four<DTYPE>(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  }
  return packed;
}

template <int N>
__device__ float largest_in(float magnitude, const float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) magnitude = larger_magnitude(magnitude, v[i]);
  return magnitude;
}

// i with its log2(M) bits in reverse.
template <int M>
__device__ constexpr int reversed(int i) {
  int result = 0;
  for (int high = M / 2, low = 1; high > 0; high /= 2, low *= 2)
    if (i & high) result |= low;
  return result;
}

// From M magnitudes of each thread the reciprocal of the scale of each over groups of `width` neighbouring threads, a
// power of two. The first M lanes of a group reduce one each, lane i number reversed<M>(i), and write(its number,
// scale) it. TWO: so do two groups together whose numbers differ in the lowest bit.
template <int LANES, int M, typename F>
__device__ void reciprocal_scales(const Quantization& q, float (&magnitude)[M], int width, bool two, F write) {
  static_assert(M <= 8 && M <= LANES);
  const unsigned mask = lanes_mask<LANES>();
  // Lanes exchange half of what they have, which leaves each with half as many numbers.
#pragma unroll
  for (int half = M / 2, bit = 1; half > 0; half /= 2, bit *= 2) {
    const bool upper = lane() & bit;
#pragma unroll
    for (int j = 0; j < half; ++j) {
      const float given = upper ? magnitude[j] : magnitude[j + half];
      const float kept = upper ? magnitude[j + half] : magnitude[j];
      magnitude[j] = larger_magnitude(kept, __shfl_xor_sync(mask, given, bit));
    }
  }
  float amax = magnitude[0];
#pragma unroll
  for (int bit = M; bit < LANES; bit *= 2)
    if (bit < width) amax = larger_magnitude(amax, __shfl_xor_sync(mask, amax, bit));
  if (M > 1 && two) amax = larger_magnitude(amax, __shfl_xor_sync(mask, amax, M / 2));

  const float scale = scale_of(q, amax), reciprocal = 1.0f / scale;
  if ((lane() & (width - 1)) < M) write(reversed<M>(lane() % M), scale);
#pragma unroll
  for (int j = 0; j < M; ++j) magnitude[j] = __shfl_sync(mask, reciprocal, reversed<M>(j), M);
}

// The same where a group may have fewer threads than each has magnitudes, LEAST of them: then of so many at a time.
template <int LANES, int LEAST, int M, typename F>
__device__ void reciprocal_scales_of(const Quantization& q, float (&magnitude)[M], int width, bool two, F write) {
  if constexpr (M > LEAST) {
    if (width < M) {
#pragma unroll
      for (int begin = 0; begin < M; begin += LEAST) {
        float some[LEAST];
#pragma unroll
        for (int j = 0; j < LEAST; ++j) some[j] = magnitude[begin + j];
        reciprocal_scales<LANES>(q, some, width, two, [&](int number, float scale) { write(begin + number, scale); });
#pragma unroll
        for (int j = 0; j < LEAST; ++j) magnitude[begin + j] = some[j];
      }
      return;
    }
  }
  reciprocal_scales<LANES>(q, magnitude, width, two, write);
}

}  // namespace jaxnorm::cuda
