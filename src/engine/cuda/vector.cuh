// The vector vocabulary: N consecutive elements of a row, packed as they lie in memory or unpacked as floats.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "engine/cuda/plan.h"
#include "engine/cuda/ptx.cuh"

namespace jaxnorm::cuda {

template <typename T>
constexpr Dtype kDtype = sizeof(T) == 4              ? Dtype::f32
                         : std::is_same_v<T, __half> ? Dtype::f16
                                                     : Dtype::bf16;

// Elements in the unit of access, 16 bytes of T.
template <typename T>
constexpr int kVector = vector_of(kDtype<T>);

constexpr int min_of(int a, int b) { return a < b ? a : b; }

// The lanes of a warp that share this thread's group of WIDTH neighbours, while other groups may have gone elsewhere.
template <int WIDTH>
__device__ unsigned lanes_mask() {
  if constexpr (WIDTH == kWarp) {
    return 0xffffffffu;
  } else {
    return ((1u << WIDTH) - 1) << (threadIdx.x % kWarp / WIDTH * WIDTH);
  }
}

template <typename T, int N>
struct alignas(min_of(16, N * sizeof(T))) Packed {
  uint32_t word[N * sizeof(T) / 4];
};

template <typename T>
struct Packed<T, 1> {
  T element;
};

template <typename T, int N>
__device__ void unpack(const Packed<T, N>& from, float (&to)[N]) {
  if constexpr (N == 1) {
    to[0] = static_cast<float>(from.element);
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = __uint_as_float(from.word[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const uint32_t word = from.word[i];
      if constexpr (std::is_same_v<T, __half>) {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word));
        to[2 * i] = pair.x;
        to[2 * i + 1] = pair.y;
      } else {
        to[2 * i] = __uint_as_float(word << 16);
        to[2 * i + 1] = __uint_as_float(word & 0xffff0000u);
      }
    }
  }
}

// The same with 0 added, which makes a zero positive: two elements of a half type at once.
template <typename T, int N>
__device__ void unpack_plus_zero(Packed<T, N> from, float (&to)[N]) {
  if constexpr (sizeof(T) == 2 && N > 1) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const uint32_t zero = 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const Pair sum = __hadd2(reinterpret_cast<const Pair&>(from.word[i]), reinterpret_cast<const Pair&>(zero));
      from.word[i] = reinterpret_cast<const uint32_t&>(sum);
    }
    unpack(from, to);
  } else {
    unpack(from, to);
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] += 0.0f;
  }
}

__device__ inline uint32_t pack_pair(float a, float b, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ inline uint32_t pack_pair(float a, float b, __half) {
  const __half2 pair = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <typename T, int N>
__device__ Packed<T, N> pack(const float (&from)[N]) {
  Packed<T, N> to;
  if constexpr (N == 1) {
    to.element = static_cast<T>(from[0]);
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) to.word[i] = __float_as_uint(from[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) to.word[i] = pack_pair(from[2 * i], from[2 * i + 1], T{});
  }
  return to;
}

// The elements of a vector, one by one. This and the next are functions of their own: kernels that are not fast anyway
// share them, and take less time to compile.
template <int N, typename T>
__device__ __noinline__ Packed<T, N> load_elements(const T* from, int remaining) {
  Packed<T, N> packed{};
  T* element = reinterpret_cast<T*>(packed.word);
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < remaining) element[i] = from[i];
  return packed;
}

template <int N, typename T>
__device__ __noinline__ void store_elements(T* to, Packed<T, N> packed, int remaining) {
  const T* element = reinterpret_cast<const T*>(packed.word);
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < remaining) to[i] = element[i];
}

// The longest access that divides so many bytes.
template <unsigned BYTES>
using AccessOf = std::conditional_t<BYTES % 16 == 0, uint4, std::conditional_t<BYTES % 8 == 0, uint2, uint32_t>>;

// N elements of an array that the kernel does not write; those from the `remaining`-th on are zero. ALIGNED promises
// that all N are there or, if `remaining` is not positive, none, and that `from` is aligned as Packed is. The values,
// and so all results, are the same either way.
template <bool ALIGNED, int N, typename T>
__device__ Packed<T, N> load(const T* from, int remaining) {
  Packed<T, N> packed{};
  if constexpr (N == 1) {
    if (remaining > 0) packed.element = __ldg(from);
  } else if constexpr (ALIGNED) {
    using Access = AccessOf<sizeof(packed)>;
#pragma unroll
    for (unsigned i = 0; i < sizeof(packed) / sizeof(Access); ++i)
      if (remaining > 0) reinterpret_cast<Access*>(packed.word)[i] = __ldg(reinterpret_cast<const Access*>(from) + i);
  } else {
    return load_elements<N>(from, remaining);
  }
  return packed;
}

// The same for whole aligned vectors, at this place among other such loads and stores: the compiler does not put it off
// until the value is needed.
template <int N, typename T>
__device__ Packed<T, N> load_now(const T* from, int remaining) {
  Packed<T, N> packed{};
  using Access = AccessOf<sizeof(packed)>;
#pragma unroll
  for (unsigned i = 0; i < sizeof(packed) / sizeof(Access); ++i)
    if (remaining > 0) load_now(reinterpret_cast<Access*>(packed.word)[i], reinterpret_cast<const Access*>(from) + i);
  return packed;
}

// A vector from shared memory.
template <int N, typename T>
__device__ Packed<T, N> load_shared(const T* from) {
  Packed<T, N> packed;
  if constexpr (N == 1) {
    packed.element = *from;
  } else {
    using Access = AccessOf<sizeof(packed)>;
#pragma unroll
    for (unsigned i = 0; i < sizeof(packed) / sizeof(Access); ++i)
      reinterpret_cast<Access*>(packed.word)[i] = reinterpret_cast<const Access*>(from)[i];
  }
  return packed;
}

template <int N>
__device__ void store_shared(float* to, const float (&from)[N]) {
  if constexpr (N == 1) {
    *to = from[0];
  } else if constexpr (N == 2) {
    *reinterpret_cast<float2*>(to) = make_float2(from[0], from[1]);
  } else {
    static_assert(N % 4 == 0);
#pragma unroll
    for (int i = 0; i < N; i += 4)
      *reinterpret_cast<float4*>(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
  }
}

// Stores the first `remaining` of N elements. ALIGNED: as in `load`.
template <bool ALIGNED, int N, typename T>
__device__ void store(T* to, const Packed<T, N>& packed, int remaining) {
  if constexpr (N == 1) {
    if (remaining > 0) *to = packed.element;
  } else if constexpr (ALIGNED) {
    using Access = AccessOf<sizeof(packed)>;
#pragma unroll
    for (unsigned i = 0; i < sizeof(packed) / sizeof(Access); ++i)
      if (remaining > 0)
        store_vector(reinterpret_cast<Access*>(to) + i, reinterpret_cast<const Access*>(packed.word)[i]);
  } else {
    store_elements<N>(to, packed, remaining);
  }
}

// A whole aligned vector that leaves the cache first.
template <int N, typename T>
__device__ void store_streaming(T* to, const Packed<T, N>& packed) {
  using Access = std::conditional_t<sizeof(packed) % 16 == 0, uint4, uint2>;
#pragma unroll
  for (unsigned i = 0; i < sizeof(packed) / sizeof(Access); ++i)
    __stcs(reinterpret_cast<Access*>(to) + i, reinterpret_cast<const Access*>(packed.word)[i]);
}

// Calls f with a null pointer of the element type that `dtype` names: dtypes that are known only at run time.
template <typename F>
__device__ void with_type(Dtype dtype, F f) {
  if (dtype == Dtype::f32) {
    f(static_cast<float*>(nullptr));
  } else if (dtype == Dtype::bf16) {
    f(static_cast<__nv_bfloat16*>(nullptr));
  } else {
    f(static_cast<__half*>(nullptr));
  }
}

template <bool ALIGNED, int N>
__device__ void load_floats(const Input& from, int64_t col, int remaining, float (&to)[N]) {
  with_type(from.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    unpack(load<ALIGNED, N>(static_cast<const T*>(from.data) + col, remaining), to);
  });
}

template <int N>
__device__ void store_floats(const Output& to, int64_t col, const float (&from)[N]) {
  with_type(to.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    store<true>(static_cast<T*>(to.data) + col, pack<T>(from), N);
  });
}

__device__ inline void store_float(const Output& to, int64_t index, float value) {
  with_type(to.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    static_cast<T*>(to.data)[index] = static_cast<T>(value);
  });
}

// One unit in the last place from the quotient at most, without the branches of an exact division.
__device__ inline float reciprocal(float value) {
  const float estimate = reciprocal_estimate(value);
  return fmaf(estimate, fmaf(-value, estimate, 1.0f), estimate);
}

// 1 / sqrt(value) to one unit in the last place. Of zero and of infinity the estimate is exact and the correction is
// not a number.
__device__ inline float reciprocal_sqrt(float value) {
  const float estimate = rsqrtf(value);
  const float better = fmaf(0.5f * estimate, fmaf(-value * estimate, estimate, 1.0f), estimate);
  return value > 0.0f && value < INFINITY ? better : estimate;
}

__device__ inline float round_to(Dtype dtype, float value) {
  if (dtype == Dtype::bf16) return __bfloat162float(__float2bfloat16_rn(value));
  if (dtype == Dtype::f16) return __half2float(__float2half_rn(value));
  return value;
}

}  // namespace jaxnorm::cuda
