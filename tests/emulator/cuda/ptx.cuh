// What src/cuda/ptx.cuh says in PTX.
#pragma once

namespace jaxnorm::cuda {

inline char* dynamic_shared() { return emulator::dynamic_shared(); }

template <typename V>
void load_now(V& to, const V* from) {
  to = *from;
}

template <typename V>
void store_vector(V* to, V value) {
  *to = value;
}

inline float reciprocal_estimate(float value) { return 1 / value; }

template <typename T>
void hide(T*&) {}

}  // namespace jaxnorm::cuda
