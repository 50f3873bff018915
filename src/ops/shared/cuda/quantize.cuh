// Quantising: the arithmetic of `Quantization`, each operation rounded as it stands there, for what a thread group's
// threads have in registers, and for what a block does. The divisions are exact ones, so a group's are done by one
// thread, or few.
#pragma once

#include <cuda_fp8.h>

#include <algorithm>

#include "engine/cuda/fragment.cuh"
#include "engine/cuda/launch.cuh"
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

// By a block, which keeps what shares a scale in registers, if it has room for it, between the largest magnitude and
// the values.
constexpr int kMostRowWarps = 16;

template <int N>
__device__ void store_values(const Output& to, int64_t at, float (&v)[N], float reciprocal, int count) {
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] *= reciprocal;
  with_quantized(to.dtype, [&](auto dtype) {
    store<true>(static_cast<uint8_t*>(to.data) + at, pack_quantized<decltype(dtype)::value>(v), count);
  });
}

// By all threads of a block: the group of this number. HELD: how many vectors each thread keeps; 0: it computes them
// again. WARPS: the most of a block. A block's next group has the other one of two turns. compute(column, count, y)
// gives a vector, whose elements are there or, with a count of 0, none.
template <int N, int HELD, int WARPS, typename F>
__device__ void quantize_group(const Quantization& q, int64_t number, int turn, F compute) {
  __shared__ float of_warps[2][WARPS];
  float (&largest)[WARPS] = of_warps[turn];
  const int64_t at = number * q.group;
  const auto there = [&](int64_t column) { return column < q.group ? N : 0; };
  float kept[HELD > 0 ? HELD : 1][N], amax = 0.0f;
  const int64_t first = int64_t{threadIdx.x} * N, step = int64_t{blockDim.x} * N;
  if constexpr (HELD > 0) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      compute(first + i * step, there(first + i * step), kept[i]);
      amax = largest_in(amax, kept[i]);
    }
  } else if (!q.given) {
    for (int64_t column = first; column < q.group; column += step) {
      compute(column, N, kept[0]);
      amax = largest_in(amax, kept[0]);
    }
  }
  amax = warp_largest(amax);
  if (lane() == 0) largest[threadIdx.x / kWarp] = amax;
  __syncthreads();
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) amax = larger_magnitude(amax, largest[warp]);
  const float scale = q.given ? __ldg(q.given) : scale_of(q, amax), reciprocal = 1.0f / scale;
  if (!q.given && threadIdx.x == 0) q.scales[number] = amax == 0.0f ? q.of_zeros : scale;
  if constexpr (HELD > 0) {
#pragma unroll
    for (int i = 0; i < HELD; ++i)
      store_values(q.values, at + first + i * step, kept[i], reciprocal, there(first + i * step));
  } else {
    for (int64_t column = first; column < q.group; column += step) {
      compute(column, N, kept[0]);
      store_values(q.values, at + column, kept[0], reciprocal, N);
    }
  }
}

// Whether a block of at most so many warps keeps a group of so many columns.
template <int N, int HELD, int WARPS>
bool is_held(int64_t columns) {
  return columns <= int64_t{WARPS} * kWarp * HELD * N;
}

// Of a block for such a group: as few as have room for it with the vectors that each thread holds.
template <int N, int HELD, int WARPS>
int row_warps(int64_t columns) {
  const int64_t vectors = (columns + N - 1) / N, held = HELD > 0 ? HELD : 1;
  return static_cast<int>(std::min<int64_t>(WARPS, (vectors + held * kWarp - 1) / (held * kWarp)));
}

// A block for each group, of as few warps as have room for it with the vectors that each thread holds.
template <int N, int HELD, typename Op>
cudaError_t launch_groups_of(void (*kernel)(Op), const Op& p, int64_t columns, int64_t blocks, cudaStream_t stream) {
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  if (blocks == 0) return cudaSuccess;
  const int threads = row_warps<N, HELD, kMostRowWarps>(columns) * kWarp;
  return launch_grid(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), stream, p);
}

}  // namespace jaxnorm::cuda
