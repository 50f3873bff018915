// What sm_90 brought: clusters of blocks, barriers that count bytes, and bulk copies. Wrapped so that code that uses
// them compiles for older architectures, where it is never launched.
//
// Blocks of a cluster exchange values by asynchronous stores that count their bytes at a barrier of the receiver. A
// barrier of the whole cluster would do too, and cost microseconds: it waits for every store to global memory that came
// before it.
#pragma once

#include <cstdint>

namespace jaxnorm::cuda {

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
