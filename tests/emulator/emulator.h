// CUDA's kernel language on the host, as much of it as the kernels use, so that their results can be tested without a
// GPU. It comes before everything else (-include emulator.h).
//
// A block is an OS thread and its threads are fibers that take turns: shared memory is thread-local, and a barrier or a
// shuffle goes on to the next fiber until all have come. The blocks of a cluster run side by side, others one after the
// other. What hardware does at once or late (bulk copies) is done at once: a copy into memory still in use is seen,
// a missing wait is not, nor is a race, which compute-sanitizer finds.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#undef __global__
#undef __device__
#undef __shared__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __align__
#define __global__
#define __device__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

using std::max;
using std::min;
inline int64_t min(int a, int64_t b) { return std::min<int64_t>(a, b); }

// Not thread_local, which asks at each use whether it has to be initialised.
extern __thread uint3 threadIdx, blockIdx;
extern __thread dim3 blockDim, gridDim;

namespace emulator {

constexpr int kDynamicShared = 227 << 10;
extern int multiprocessors;  // of the GPU

// Blocks that run side by side. `anchors`: the address of one thread-local variable in each of them, from which those
// of all others follow.
struct Cluster {
  int blocks, threads;
  std::vector<char*> anchors;
  std::atomic<int> started{0}, arrived{0};
};

// The calling block's cluster, its rank there and its dynamic shared memory.
Cluster& cluster();
int rank();
char* dynamic_shared();

// Where `block` of the cluster keeps what this block keeps at `own`.
void* remote(void* own, int block);

// Lets the block's next fiber go on.
void yield();

template <typename F>
void wait_until(const F& ready) {
  while (!ready()) yield();
}

// Waits for `threads` threads at barrier `id`; 0: for all that have not returned.
void barrier(int id, int threads);

// Waits for all threads of the warp that have not returned.
void sync_warp();

// What the block's thread `other`, of the same warp, passes with its call that corresponds to this one.
uint32_t shuffle(uint32_t value, int other);

// Runs every block of a grid.
void launch(const cudaLaunchConfig_t& config, const std::function<void()>& kernel);

template <typename... Params, typename... Args>
cudaError_t launch_kernel(const cudaLaunchConfig_t* config, void (*kernel)(Params...), const Args&... args) {
  launch(*config, [&] { kernel(args...); });
  return cudaSuccess;
}

}  // namespace emulator

#define cudaLaunchKernelEx emulator::launch_kernel

inline uint32_t atomicMax(uint32_t* of, uint32_t value) {
  uint32_t was = __atomic_load_n(of, __ATOMIC_RELAXED);
  while (was < value && !__atomic_compare_exchange_n(of, &was, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return was;
}

inline uint32_t atomicAdd(uint32_t* of, uint32_t value) { return __atomic_fetch_add(of, value, __ATOMIC_RELAXED); }

// Byte i of the result is the byte of b and a, b's being the upper four, that the i-th hexadecimal digit names.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t digits) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (8 * (digits >> 4 * i & 7)) & 0xff) << 8 * i;
  return result;
}

inline void __syncthreads() { emulator::barrier(0, 0); }
inline void __syncwarp() { emulator::sync_warp(); }

template <typename T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  static_assert(sizeof(T) % 4 == 0);
  uint32_t words[sizeof(T) / 4];
  std::memcpy(words, &value, sizeof(T));
  const int thread = threadIdx.x + threadIdx.y * blockDim.x;
  for (uint32_t& word : words) word = emulator::shuffle(word, thread - thread % width + lane % width);
  std::memcpy(&value, words, sizeof(T));
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  const int thread = threadIdx.x + threadIdx.y * blockDim.x;
  return __shfl_sync(mask, value, thread % 32 ^ distance);
}

// Of a whole warp.
inline unsigned __ballot_sync(unsigned mask, bool value) {
  unsigned bits = unsigned{value} << (threadIdx.x + threadIdx.y * blockDim.x) % 32;
  for (int distance = 1; distance < 32; distance *= 2) bits |= __shfl_xor_sync(mask, bits, distance);
  return bits;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }
inline int __clz(unsigned bits) { return __builtin_clz(bits); }

template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
