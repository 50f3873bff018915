// Thread-block clusters (sm_90 and later), so that code that uses them compiles for older architectures, where it is
// never launched.
//
// Blocks exchange values by asynchronous stores that count their bytes at a barrier of the receiver. A barrier of the
// whole cluster would do too, and cost microseconds: it waits for every store to global memory that came before it.
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
  __device__ static int rank() {
    uint32_t value = 0;
    JAXNORM_SM90(asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value)));
    return value;
  }

  __device__ static int blocks() {
    uint32_t value = 1;
    JAXNORM_SM90(asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(value)));
    return value;
  }

  __device__ static void arrive() {
    JAXNORM_SM90(asm volatile("barrier.cluster.arrive.release.aligned;" :: : "memory"));
  }

  __device__ static void wait() { JAXNORM_SM90(asm volatile("barrier.cluster.wait.acquire.aligned;" :: : "memory")); }
};

// A barrier in this block's shared memory that completes a phase once the bytes announced for it have arrived.
struct Arrival {
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
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
                     "@!done bra AGAIN;\n\t}" ::"r"(shared_address(&state)),
                     "r"(parity) : "memory"));
  }

  // Writes value to where `block` keeps what this block keeps at `to`, and counts its bytes at that block's barrier.
  __device__ void send(float* to, float value, int block) {
    JAXNORM_SM90(asm volatile(
        "{\n\t.reg .b32 to, at;\n\t"
        "mapa.shared::cluster.u32 to, %0, %2;\n\t"
        "mapa.shared::cluster.u32 at, %1, %2;\n\t"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %3, [at];\n\t}" ::"r"(shared_address(to)),
        "r"(shared_address(&state)), "r"(block), "r"(__float_as_uint(value)) : "memory"));
  }
};

#undef JAXNORM_SM90

}  // namespace jaxnorm::cuda
