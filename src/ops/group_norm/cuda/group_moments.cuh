// The moments of channels.
#pragma once

#include "engine/cuda/vector.cuh"

namespace jaxnorm::cuda {

// The mean of a channel over positions, and the sum of squares about it; joined as Chan, Golub and LeVeque do, 1983.
struct JoinMoments {
  float share, cross;

  __device__ JoinMoments(float count, float other) {
    share = other > 0 ? other * reciprocal(count + other) : 0.0f;
    cross = count * share;
  }

  __device__ float2 operator()(const float2& a, const float2& b) const {
    const float distance = b.x - a.x;
    return make_float2(fmaf(distance, share, a.x), a.y + fmaf(cross * distance, distance, b.y));
  }
};

// Those of up to COUNT values of each channel; of fewer, `there` says which. The squares are those about their own
// mean.
template <int COUNT, typename X, int N, typename F>
__device__ void moments_of(const Packed<X, N> (&packed)[COUNT], float count, F there, float2 (&now)[N]) {
  const auto for_each = [&](auto f) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      float values[N];
      unpack(packed[k], values);
#pragma unroll
      for (int i = 0; i < N; ++i) f(k, i, values[i]);
    }
  };
#pragma unroll
  for (int i = 0; i < N; ++i) now[i] = make_float2(0, 0);
  for_each([&](int, int i, float value) { now[i].x += value; });  // what is not there is zero
  const float share = reciprocal(count);
#pragma unroll
  for (int i = 0; i < N; ++i) now[i].x *= share;
  for_each([&](int k, int i, float value) {
    const float off = there(k) ? value - now[i].x : 0.0f;
    now[i].y = fmaf(off, off, now[i].y);
  });
}

}  // namespace jaxnorm::cuda
