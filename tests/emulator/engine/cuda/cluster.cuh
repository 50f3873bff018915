// What src/engine/cuda/cluster.cuh does with sm_90's instructions.
#pragma once

#include <mutex>

namespace jaxnorm::cuda {

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
