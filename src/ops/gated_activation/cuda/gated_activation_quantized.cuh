// Gated activations with a quantised result. Groups of columns that share a scale lie in neighbouring threads; for
// whole rows a block keeps its row in registers, if it has room for it, between the largest magnitude and the values.
#pragma once

#include <algorithm>
#include <iterator>

#include "ops/gated_activation/cuda/gated_activation.cuh"
#include "ops/shared/cuda/quantize.cuh"

namespace jaxnorm::cuda {

using QuantizedGates = GatedActivationQuantizedForward;

// The vector of y, in f32, whose elements in an array like the gate begin at `in`; zeros where there is none.
template <typename A, typename X, int N>
__device__ void gated_vector(const QuantizedGates& p, int64_t in, int count, float (&y)[N]) {
  float up[N];
  unpack(load<true, N>(static_cast<const X*>(p.gate.data) + in, count), y);
  unpack(load<true, N>(static_cast<const X*>(p.up.data) + in, count), up);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = A::template of<float>(y[i]) * up[i];
}

template <int N>
__device__ void store_values(const Output& to, int64_t at, float (&v)[N], float reciprocal, int count) {
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] *= reciprocal;
  with_quantized(to.dtype, [&](auto dtype) {
    store<true>(static_cast<uint8_t*>(to.data) + at, pack_quantized<decltype(dtype)::value>(v), count);
  });
}

// A scale that is given, or one for each kGroups columns, of aligned vectors: a tile, as of the result that is not
// quantised. The threads of a group are neighbours, and all of its vectors are there or none.
template <typename X, typename Tile>
__global__ void __launch_bounds__(kGateThreads) quantized_groups_kernel(QuantizedGates p) {
  constexpr int N = Tile::N;
  const Tile tile(p);
  const int width = static_cast<int>(p.quantized.group) / N;
  const float given = p.quantized.given ? 1.0f / __ldg(p.quantized.given) : 0.0f;
  with_gate(p.activation, [&](auto activation) {
    tile.each([&](int, int64_t at, int64_t in, int count) {
      float y[N], reciprocal = given;
      gated_vector<decltype(activation), X>(p, in, count, y);
      if (!p.quantized.given) {
        float amax = largest_in(0.0f, y);
        for (int bit = 1; bit < width; bit *= 2) amax = larger_magnitude(amax, __shfl_xor_sync(0xffffffffu, amax, bit));
        const float scale = scale_of(p.quantized, amax);
        if (count > 0 && lane() % width == 0) p.quantized.scales[at / p.quantized.group] = scale;
        reciprocal = 1.0f / scale;
      }
      store_values(p.quantized.values, at, y, reciprocal, count);
    });
  });
}

constexpr int kMostRowWarps = 16;

// A block for what shares a scale. HELD: how many vectors each thread keeps; 0: it computes them again.
template <typename X, int N, int HELD>
__global__ void __launch_bounds__(kMostRowWarps* kWarp) quantized_rows_kernel(QuantizedGates p) {
  __shared__ float largest[kMostRowWarps];
  const Quantization& q = p.quantized;
  const int64_t groups = p.cols / q.group, row = blockIdx.x / groups, begin = blockIdx.x % groups * q.group;
  const int64_t in = row * p.stride + begin, at = row * p.cols + begin;
  const auto there = [&](int64_t column) { return column < q.group ? N : 0; };
  with_gate(p.activation, [&](auto activation) {
    using A = decltype(activation);
    float kept[HELD > 0 ? HELD : 1][N], amax = 0.0f;
    const int64_t first = int64_t{threadIdx.x} * N, step = int64_t{blockDim.x} * N;
    if constexpr (HELD > 0) {
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        gated_vector<A, X>(p, in + first + i * step, there(first + i * step), kept[i]);
        amax = largest_in(amax, kept[i]);
      }
    } else if (!q.given) {
      for (int64_t column = first; column < q.group; column += step) {
        gated_vector<A, X>(p, in + column, N, kept[0]);
        amax = largest_in(amax, kept[0]);
      }
    }
    amax = warp_largest(amax);
    if (lane() == 0) largest[threadIdx.x / kWarp] = amax;
    __syncthreads();
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarp; ++warp)
      amax = larger_magnitude(amax, largest[warp]);
    const float scale = q.given ? __ldg(q.given) : scale_of(q, amax), reciprocal = 1.0f / scale;
    if (!q.given && threadIdx.x == 0) q.scales[blockIdx.x] = scale;
    if constexpr (HELD > 0) {
#pragma unroll
      for (int i = 0; i < HELD; ++i)
        store_values(q.values, at + first + i * step, kept[i], reciprocal, there(first + i * step));
    } else {
      for (int64_t column = first; column < q.group; column += step) {
        gated_vector<A, X>(p, in + column, N, kept[0]);
        store_values(q.values, at + column, kept[0], reciprocal, N);
      }
    }
  });
}

// Blocks of as few warps as have room for what shares a scale, with the vectors that each thread holds.
template <typename X, int N, int HELD>
cudaError_t launch_quantized_rows(const QuantizedGates& p, cudaStream_t stream) {
  const int64_t vectors = (p.quantized.group + N - 1) / N, held = HELD > 0 ? HELD : 1;
  const int64_t warps = std::min<int64_t>(kMostRowWarps, (vectors + held * kWarp - 1) / (held * kWarp));
  const int64_t blocks = p.rows * (p.cols / p.quantized.group);
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  if (blocks == 0) return cudaSuccess;
  return launch_grid(quantized_rows_kernel<X, N, HELD>, dim3(static_cast<unsigned>(blocks)),
                     dim3(static_cast<unsigned>(warps * kWarp)), stream, p);
}

template <typename X>
cudaError_t run_gated_activation_quantized(const QuantizedGates& p, cudaStream_t stream) {
  constexpr int N = kVector<X>, kHeld = 32 / N;
  const Quantization& q = p.quantized;
  // Values are stored N at once.
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.gate, p.up, q.values);
  if (!is_aligned) return launch_quantized_rows<X, 1, 0>(p, stream);
  const bool is_known = std::find(std::begin(kGroups), std::end(kGroups), q.group) != std::end(kGroups);
  if (q.given || is_known) {
    using Tile = GateTile<N, 1>;
    return launch_gates<Tile>(quantized_groups_kernel<X, Tile>, p, stream);
  }
  return q.group <= kMostRowWarps * kWarp * kHeld * N ? launch_quantized_rows<X, N, kHeld>(p, stream)
                                                      : launch_quantized_rows<X, N, 0>(p, stream);
}

}  // namespace jaxnorm::cuda
