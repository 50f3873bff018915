// What C++ has no words for, on every architecture; cluster.cuh has what came with sm_90. The emulator of
// tests/emulator replaces both.
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

// One store instruction each: the compiler takes an assignment of these types apart.
__device__ inline void store_vector(uint4* to, uint4 value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w));
}

__device__ inline void store_vector(uint2* to, uint2 value) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(value.x), "r"(value.y));
}

__device__ inline float reciprocal_estimate(float value) {
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(value));
  return estimate;
}

// Hides from the compiler what it knows of a pointer.
template <typename T>
__device__ void hide(T*& pointer) {
  asm volatile("" : "+l"(pointer));
}

}  // namespace jaxnorm::cuda
