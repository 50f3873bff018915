// What C++ has no words for, on every architecture and on sm_90. The emulator of tests/emulator replaces it.
#pragma once

#include <cstdint>

namespace jaxnorm::cuda {

// The block's dynamic shared memory.
__device__ inline char* dynamic_shared() {
  extern __shared__ __align__(128) char shared[];
  return shared;
}

__device__ inline void load_now(uint4& to, const uint4* from) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
               : "l"(from)
               : "memory");
}

__device__ inline void load_now(uint2& to, const uint2* from) {
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(to.x), "=r"(to.y) : "l"(from) : "memory");
}

__device__ inline void load_now(uint32_t& to, const uint32_t* from) {
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(to) : "l"(from) : "memory");
}

// What is the same in all lanes, so that the compiler sees that it is.
__device__ inline int uniform(int value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, value);
#else
  return value;
#endif
}

// The count, which it raises by one, or else `otherwise`. Of an addition the compiler makes one for all lanes and waits
// for it at once; this is waited for where it is used.
__device__ inline uint32_t count_if(bool counts, uint32_t* count, uint32_t otherwise) {
  uint32_t value = otherwise;
  asm volatile(
      "{\n\t.reg .pred counts;\n\t"
      "setp.ne.u32 counts, %1, 0;\n\t"
      "@counts atom.global.inc.u32 %0, [%2], 0x7fffffff;\n\t}"
      : "+r"(value)
      : "r"(uint32_t{counts}), "l"(count)
      : "memory");
  return value;
}

// One store instruction each: the compiler takes an assignment of these types apart.
__device__ inline void store_vector(uint4* to, uint4 value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w));
}

__device__ inline void store_vector(uint2* to, uint2 value) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(value.x), "r"(value.y));
}

__device__ inline void store_vector(uint32_t* to, uint32_t value) { *to = value; }

// The larger of a magnitude and that of a value; not a number if either is not.
__device__ inline float larger_magnitude(float magnitude, float value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(magnitude), "f"(fabsf(value)));
  return larger;
#else
  return __uint_as_float(max(__float_as_uint(magnitude), __float_as_uint(fabsf(value))));
#endif
}

// The largest of a warp's magnitudes, in all lanes: those of numbers are in the order of their bits, below all others.
__device__ inline float warp_largest(float magnitude) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(magnitude)));
#else
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    magnitude = larger_magnitude(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, offset));
  return magnitude;
#endif
}

// Rounded to the nearest even integers, clipped to -127 to 127, and 0 for what is not a number; a in the lowest byte.
__device__ inline uint32_t pack_s8(float a, float b, float c, float d) {
  const auto integer = [](float value) { return max(__float2int_rn(value), -127); };
  uint32_t upper, packed;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(upper) : "r"(integer(d)), "r"(integer(c)), "r"(0));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(packed) : "r"(integer(b)), "r"(integer(a)), "r"(upper));
  return packed;
}

__device__ inline float reciprocal_estimate(float value) {
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(value));
  return estimate;
}

// 2^value to two units in the last place.
__device__ inline float exp2_estimate(float value) {
  float estimate;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(value));
  return estimate;
}

// Byte i of the result has eight times the highest bit of the word's byte that the i-th argument names.
__device__ inline uint32_t spread_highest(uint32_t word, int byte0, int byte1, int byte2, int byte3) {
  uint32_t spread;
  asm("prmt.b32 %0, %1, %1, %2;"
      : "=r"(spread)
      : "r"(word), "r"(0x8888 | byte0 | byte1 << 4 | byte2 << 8 | byte3 << 12));
  return spread;
}

// Brings a line of memory into the L2 cache.
__device__ inline void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Copies 16 bytes to shared memory, where they are once this thread has waited for its copies.
__device__ inline void copy_to_shared(char* to, const void* from) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
#else
  *reinterpret_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}

// The same of BYTES, 16, 8 or 4, that are read once; or zeros in place of what is not there.
template <int BYTES>
__device__ void copy_or_clear(char* to, const void* from, bool there) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = there ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(BYTES), "r"(bytes)
                 : "memory");
  }
#else
  for (int i = 0; i < BYTES; i += 4)
    *reinterpret_cast<uint32_t*>(to + i) = there ? reinterpret_cast<const uint32_t*>(from)[i / 4] : 0;
#endif
}

__device__ inline void wait_for_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Ends a batch of copies, which may be empty.
__device__ inline void commit_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all batches but the last BATCHES.
template <int BATCHES>
__device__ void wait_for_copies_but() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(BATCHES) : "memory");
#endif
}

// Hides from the compiler what it knows of a pointer.
template <typename T>
__device__ void hide(T*& pointer) {
  asm volatile("" : "+l"(pointer));
}

// What sm_90 brought: clusters of blocks, barriers that count bytes, and bulk copies. Wrapped so that code that uses
// them compiles for older architectures, where it is never launched.
//
// Blocks of a cluster exchange values by asynchronous stores that count their bytes at a barrier of the receiver. A
// barrier of the whole cluster would do too, and cost microseconds: it waits for every store to global memory that came
// before it.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kHasClusters = true;
#define JAXNORM_SM90(...) __VA_ARGS__
#else
constexpr bool kHasClusters = false;
#define JAXNORM_SM90(...) __trap()
#endif

__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

struct Cluster {
  // A block of a grid without clusters is the only one of its own.
  __device__ static int rank() {
    uint32_t value = 0;
    if constexpr (kHasClusters) JAXNORM_SM90(asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value)));
    return value;
  }

  __device__ static int blocks() {
    uint32_t value = 1;
    if constexpr (kHasClusters) JAXNORM_SM90(asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(value)));
    return value;
  }

  __device__ static void arrive() {
    JAXNORM_SM90(asm volatile("barrier.cluster.arrive.release.aligned;" :: : "memory"));
  }

  __device__ static void wait() { JAXNORM_SM90(asm volatile("barrier.cluster.wait.acquire.aligned;" :: : "memory")); }
};

// The address in the shared memory of `block` of the cluster that corresponds to one in this block's.
__device__ inline uint32_t remote_address([[maybe_unused]] uint32_t address, [[maybe_unused]] int block) {
  uint32_t remote = 0;
  JAXNORM_SM90(asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block)));
  return remote;
}

// Where `block` of the cluster keeps what this block keeps at `own`, of shared memory.
template <typename V>
__device__ V* remote(V* own, [[maybe_unused]] int block) {
  V* there = own;
  if constexpr (kHasClusters) JAXNORM_SM90(asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(own), "r"(block)));
  return there;
}

// A barrier in this block's shared memory that completes a phase once the bytes announced for it have arrived.
struct TransactionBarrier {
  uint64_t state;

  __device__ void init() {
    JAXNORM_SM90(asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(
        shared_address(&state)) : "memory"));
  }

  // By one thread, once a phase.
  __device__ void expect(int bytes) {
    JAXNORM_SM90(asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)),
                              "r"(bytes) : "memory"));
  }

  __device__ void wait(int parity) {
    JAXNORM_SM90(
        asm volatile("{\n\t.reg .pred done;\n"
                     "AGAIN:\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                     "@!done bra AGAIN;\n\t}" ::"r"(shared_address(&state)),
                     "r"(parity) : "memory"));
  }

  // Writes N floats to where `block` keeps what this block keeps at `to`, and counts their bytes at that block's
  // barrier.
  template <int N>
  __device__ void send(float* to, const float (&values)[N], int block) {
    static_assert(N == 1 || N == 2 || N == 4);
    const uint32_t address = shared_address(to), barrier = shared_address(&state);
    [[maybe_unused]] const uint32_t remote = remote_address(address, block), at = remote_address(barrier, block);
    if constexpr (N == 1) {
      JAXNORM_SM90(
          asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(remote),
                       "f"(values[0]), "r"(at) : "memory"));
    } else if constexpr (N == 2) {
      JAXNORM_SM90(asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(remote),
          "f"(values[0]), "f"(values[1]), "r"(at) : "memory"));
    } else {
      JAXNORM_SM90(asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
          "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(at) : "memory"));
    }
  }

  // Starts a copy of `bytes` from global to shared memory and counts them here. All three are multiples of 16.
  __device__ void copy(void* to, const void* from, int bytes) {
    JAXNORM_SM90(
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(to)),
                     "l"(from), "r"(bytes), "r"(shared_address(&state)) : "memory"));
  }
};

// A barrier of `threads` threads of the block, whole warps. Barrier 0 is that of __syncthreads.
__device__ inline void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#undef JAXNORM_SM90

}  // namespace jaxnorm::cuda
