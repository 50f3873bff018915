// The vector vocabulary of the kernels: W floats, however x, y or a weight is stored, and the types of their elements.
//
// Everything is in an unnamed namespace because this file is compiled with several instruction sets into one library:
// a function with external linkage could be merged by the linker into the version that this processor cannot run.
// For the same reason nothing of std:: is instantiated here.
#pragma once

#include <cstdint>
#include <cstring>

#include "operands.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace jaxnorm::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * W)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W)));
typedef uint8_t Bytes __attribute__((vector_size(W)));

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

// How much of a vector lies within the row: all of it, or its first lanes at the row's end.
struct Whole {};
struct Part {
  int64_t count;
};

Vec broadcast(float value) { return value - Vec{}; }

// Adding this to a number below 2^22 leaves the rounded number in the last bits.
constexpr float kRounding = 0x1.8p23f;

constexpr uint32_t kQuiet = 0x400000;  // the bit of a NaN that raises no exception

// What the compiler does not find by itself in every version, or needs several instructions for.
#if defined(__AVX512F__)

// The forms with a full mask: GCC 12 warns of an uninitialised value in its own header for those without.
constexpr __mmask16 kAll = 0xffff;
Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
Bits widen(Halves h) { return (Bits)_mm512_maskz_cvtepu16_epi32(kAll, (__m256i)h); }
Vec widen(Halves h, F16) { return _mm512_maskz_cvtph_ps(kAll, (__m256i)h); }
Halves narrow(Vec v, F16) { return (Halves)_mm512_maskz_cvtps_ph(kAll, v, _MM_FROUND_TO_NEAREST_INT); }

Halves upper_halves(Bits b) {
  constexpr __v32hi odd = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  const __m512i words = _mm512_maskz_permutexvar_epi16(~0u, (__m512i)odd, (__m512i)b);
  Halves h;
  memcpy(&h, &words, sizeof h);
  return h;
}

Bytes low_bytes(Bits b) { return (Bytes)_mm512_maskz_cvtepi32_epi8(kAll, (__m512i)b); }

// NaN stays as it is.
Vec at_least(Vec v, float low) { return _mm512_maskz_max_ps(kAll, broadcast(low), v); }

// v * 2^k, where `shifted` is k + kRounding; k is not below kLeastPower, at which the product is 0.
constexpr float kLeastPower = -160;
Vec times_power(Vec v, Vec shifted) { return _mm512_maskz_scalef_ps(kAll, v, shifted - kRounding); }
// v * 2^floor(k)
Vec times_floor_power(Vec v, Vec k) { return _mm512_maskz_scalef_ps(kAll, v, k); }
// The element of a table that the last bits of an index name.
Vec lookup(const float* table, Bits index) {
  return _mm512_maskz_permutexvar_ps(kAll, (__m512i)index, _mm512_maskz_loadu_ps(kAll, table));
}

// The bits `rounded`, but v's own where v is NaN, quiet.
Bits quiet_nans(Bits rounded, Vec v) {
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return (Bits)_mm512_mask_or_epi32((__m512i)rounded, is_nan, (__m512i)v, (__m512i)(Bits{} + kQuiet));
}

#elif defined(__AVX2__)

Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
Bits widen(Halves h) { return (Bits)_mm256_cvtepu16_epi32((__m128i)h); }
Halves upper_halves(Bits b) {
  const __m256i upper = (__m256i)(b >> 16), packed = _mm256_packus_epi32(upper, upper);
  return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
}
Bytes low_bytes(Bits b) {
  const __m256i low = (__m256i)(b & 0xff), words = _mm256_packus_epi32(low, low);
  const __m256i packed = _mm256_packus_epi16(words, words);
  const __m128i joined = _mm_unpacklo_epi32(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
  Bytes bytes;
  memcpy(&bytes, &joined, sizeof bytes);
  return bytes;
}
Vec widen(Halves h, F16) { return _mm256_cvtph_ps((__m128i)h); }
Halves narrow(Vec v, F16) { return (Halves)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
Bits quiet_nans(Bits rounded, Vec v) {
  return (Bits)_mm256_blendv_ps((Vec)rounded, (Vec)((Bits)v | kQuiet), (Vec)(v != v));
}

#else

Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
Bits widen(Halves h) { return __builtin_convertvector(h, Bits); }
Halves narrow(Bits b) { return __builtin_convertvector(b, Halves); }
Halves upper_halves(Bits b) { return narrow(b >> 16); }
Bytes low_bytes(Bits b) { return __builtin_convertvector(b, Bytes); }
Bits select(Bits condition, Bits yes, Bits no) { return (condition & yes) | (~condition & no); }
Bits quiet_nans(Bits rounded, Vec v) { return select((Bits)(v != v), (Bits)v | kQuiet, rounded); }

// Both directions avoid arithmetic on subnormal floats, which XLA's threads flush to zero.
Vec widen(Halves h, F16) {
  const Bits wide = widen(h);
  const Bits magnitude = (wide & 0x7fff) << 13;
  const Bits rebias = magnitude + ((127 - 15) << 23);
  const Bits smallest_normal = Bits{} + ((127 - 14) << 23);
  const Bits subnormal = (Bits)((Vec)(magnitude + smallest_normal) - (Vec)smallest_normal);
  const Bits special = rebias + ((128 - 16) << 23);
  const Bits value = select((Bits)(magnitude < (1u << 23)), subnormal, rebias);
  return (Vec)(select((Bits)(magnitude >= (0x1fu << 23)), special, value) | (wide & 0x8000) << 16);
}

Halves narrow(Vec v, F16) {
  const Bits sign = (Bits)v & 0x80000000u;
  const Bits magnitude = (Bits)v ^ sign;
  const Bits normal = (magnitude - ((127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Bits half = Bits{} + (126 << 23);  // 0.5f: adding it leaves the rounded subnormal in the last bits
  const Bits subnormal = (Bits)((Vec)magnitude + (Vec)half) - half;
  const Bits special = select((Bits)(magnitude > (0xffu << 23)), Bits{} + 0x7e00, Bits{} + 0x7c00);
  const Bits value = select((Bits)(magnitude < ((127u - 14) << 23)), subnormal, normal);
  const Bits bits = select((Bits)(magnitude >= ((127u + 16) << 23)), special, value) | sign >> 16;
  return narrow(bits);
}

#endif

#if !defined(__AVX512F__)

Vec at_least(Vec v, float low) { return v < low ? broadcast(low) : v; }

// An exponent of 0 makes a float of 0.
constexpr float kLeastPower = -127;
Vec times_power(Vec v, Vec shifted) { return v * (Vec)(((Bits)shifted << 23) + 0x3f800000u); }

#endif

Vec widen(Halves h, BF16) { return (Vec)(widen(h) << 16); }

// Rounds to nearest even in integers: the processor's own conversion flushes subnormals.
Halves narrow(Vec v, BF16) {
  const Bits bits = (Bits)v;
  return upper_halves(quiet_nans(bits + 0x7fff + ((bits >> 16) & 1), v));
}

Vec load(const float* p, Whole) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
Vec load(const T* p, Whole) {
  Halves h;
  memcpy(&h, p, sizeof h);
  return widen(h, T{});
}

void store(float* p, Vec v, Whole) { memcpy(p, &v, sizeof v); }

template <class T>
void store(T* p, Vec v, Whole) {
  const Halves h = narrow(v, T{});
  memcpy(p, &h, sizeof h);
}

// Stores past the caches, to memory that is aligned as what is stored; other threads may read it after fence().
#if defined(__AVX512F__)
void stream(float* p, Vec v) { _mm512_stream_ps(p, v); }
template <class T>
void stream(T* p, Vec v) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)narrow(v, T{}));
}
void fence() { _mm_sfence(); }
#elif defined(__AVX2__)
void stream(float* p, Vec v) { _mm256_stream_ps(p, v); }
template <class T>
void stream(T* p, Vec v) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)narrow(v, T{}));
}
void fence() { _mm_sfence(); }
#else
template <class T>
void stream(T* p, Vec v) {
  store(p, v, Whole{});
}
void fence() {}
#endif

// Of a Part, the lanes past the row's end are zero when loaded and left alone when stored; within() makes them zero.
Vec within(Vec v, Whole) { return v; }

#if defined(__AVX512F__)

__mmask16 mask(Part part) { return (1u << part.count) - 1; }
Vec within(Vec v, Part part) { return _mm512_maskz_mov_ps(mask(part), v); }
Vec load(const float* p, Part part) { return _mm512_maskz_loadu_ps(mask(part), p); }
void store(float* p, Vec v, Part part) { _mm512_mask_storeu_ps(p, mask(part), v); }

template <class T>
Vec load(const T* p, Part part) {
  return widen((Halves)_mm256_maskz_loadu_epi16(mask(part), p), T{});
}

template <class T>
void store(T* p, Vec v, Part part) {
  _mm256_mask_storeu_epi16(p, mask(part), (__m256i)narrow(v, T{}));
}

#else

template <class T>
Vec load(const T* p, Part part) {
  T lanes[W] = {};
  memcpy(lanes, p, part.count * sizeof(T));
  return load(lanes, Whole{});
}

template <class T>
void store(T* p, Vec v, Part part) {
  T lanes[W];
  store(lanes, v, Whole{});
  memcpy(p, lanes, part.count * sizeof(T));
}

Vec within(Vec v, Part part) { return load(reinterpret_cast<const float*>(&v), part); }

#endif

Vec rounded_to(Vec v, float) { return v; }
template <class T>
Vec rounded_to(Vec v, T) {
  return widen(narrow(v, T{}), T{});
}

float sum_of_lanes(Vec v) {
  Vec4 parts[W / 4];
  memcpy(parts, &v, sizeof v);
  for (int i = 1; i < W / 4; ++i) parts[0] += parts[i];
  return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

// Of numbers that are not NaN.
float max_of_lanes(Vec v) {
  Vec4 parts[W / 4];
  memcpy(parts, &v, sizeof v);
  for (int i = 1; i < W / 4; ++i) parts[0] = parts[i] > parts[0] ? parts[i] : parts[0];
  const float a = parts[0][0] > parts[0][2] ? parts[0][0] : parts[0][2];
  const float b = parts[0][1] > parts[0][3] ? parts[0][1] : parts[0][3];
  return a > b ? a : b;
}

// From dtypes, known when a kernel is called, to the types that stand for them when it is compiled.
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
