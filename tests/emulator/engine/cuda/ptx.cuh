// What src/engine/cuda/ptx.cuh says in PTX.
#pragma once

#include <mutex>

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

constexpr bool kHasClusters = true;

struct Cluster {
  static int rank() { return emulator::rank(); }
  static int blocks() { return emulator::cluster().blocks; }
  // At which of its barriers each thread of this block has arrived.
  static int& barrier_of_thread() {
    static thread_local int barriers[1024];
    return barriers[threadIdx.x];
  }
  static void arrive() { barrier_of_thread() = emulator::cluster().arrived++ / emulator::cluster().threads; }
  static void wait() {
    emulator::wait_until(
        [] { return emulator::cluster().arrived >= (barrier_of_thread() + 1) * emulator::cluster().threads; });
  }
};

template <typename V>
V* remote(V* own, int block) {
  return static_cast<V*>(emulator::remote(own, block));
}

// Bytes to come, which may come before they are announced; whether they were; and the phase.
struct TransactionBarrier {
  int32_t missing;
  bool announced, phase;

  void init() { *this = {}; }
  void expect(int bytes) { add(bytes, true); }
  void wait(int parity) {
    emulator::wait_until([&] {
      const std::lock_guard lock(mutex());
      return phase != parity;
    });
  }

  template <int N>
  void send(float* to, const float (&values)[N], int block) {
    std::memcpy(emulator::remote(to, block), values, sizeof values);
    static_cast<TransactionBarrier*>(emulator::remote(this, block))->add(-static_cast<int>(sizeof values), false);
  }

  void copy(void* to, const void* from, int bytes) {
    const auto is_whole = [](auto value) { return (uintptr_t)value % 16 == 0; };
    if (!is_whole(to) || !is_whole(from) || !is_whole(bytes)) std::abort();
    std::memcpy(to, from, bytes);
    add(-bytes, false);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }

  void add(int bytes, bool announces) {
    const std::lock_guard lock(mutex());
    if (announces && announced) std::abort();
    missing += bytes;
    announced |= announces;
    if (!announced || missing != 0) return;
    announced = false;
    phase = !phase;
  }
};

static_assert(sizeof(TransactionBarrier) == 8);

inline void barrier(int id, int threads) { emulator::barrier(id, threads); }

}  // namespace jaxnorm::cuda
