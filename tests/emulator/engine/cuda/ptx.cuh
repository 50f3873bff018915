// What src/engine/cuda/ptx.cuh says in PTX.
#pragma once

namespace jaxnorm::cuda {

inline char* dynamic_shared() { return emulator::dynamic_shared(); }

template <typename V>
void load_now(V& to, const V* from) {
  to = *from;
}

inline int uniform(int value) { return value; }

inline uint32_t count_if(bool counts, uint32_t* count, uint32_t otherwise) { return counts ? (*count)++ : otherwise; }

template <typename V>
void store_vector(V* to, V value) {
  *to = value;
}

inline float larger_magnitude(float magnitude, float value) {
  return __uint_as_float(max(__float_as_uint(magnitude), __float_as_uint(std::fabs(value))));
}

inline float warp_largest(float magnitude) {
  for (int offset = 16; offset > 0; offset /= 2)
    magnitude = larger_magnitude(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, offset));
  return magnitude;
}

inline uint32_t pack_s8(float a, float b, float c, float d) {
  const auto byte = [](float value) -> uint32_t {
    if (std::isnan(value)) return 0;
    return static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(min(max(value, -127.0f), 127.0f))));
  };
  return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
}

// Of these instructions what is below the smallest normal number is zero.
inline float flushed(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }
inline float reciprocal_estimate(float value) { return flushed(1 / flushed(value)); }
inline float exp2_estimate(float value) { return flushed(std::exp2(flushed(value))); }

inline uint32_t spread_highest(uint32_t word, int byte0, int byte1, int byte2, int byte3) {
  uint32_t spread = 0;
  for (const int byte : {byte3, byte2, byte1, byte0}) spread = spread << 8 | (word >> (8 * byte + 7) & 1) * 0xff;
  return spread;
}

inline void copy_to_shared(char* to, const void* from) { std::memcpy(to, from, 16); }
template <int BYTES>
void copy_or_clear(char* to, const void* from, bool there) {
  there ? std::memcpy(to, from, BYTES) : std::memset(to, 0, BYTES);
}
inline void wait_for_copies() {}
inline void commit_copies() {}
template <int BATCHES>
void wait_for_copies_but() {}

inline void prefetch(const void*) {}

template <typename T>
void hide(T*&) {}

}  // namespace jaxnorm::cuda
