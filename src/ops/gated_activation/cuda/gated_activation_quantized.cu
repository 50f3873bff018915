// Gated activations with a quantised result. Groups of columns that share a scale lie in neighbouring threads, whole
// rows in a block.
#include <iterator>

#include "engine/cuda/device.h"
#include "ops/gated_activation/cuda/gate_tile.cuh"
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

// A block for what shares a scale.
template <typename X, int N, int HELD>
__global__ void __launch_bounds__(kMostRowWarps* kWarp) quantized_rows_kernel(QuantizedGates p) {
  const int64_t groups = p.cols / p.quantized.group, row = blockIdx.x / groups;
  const int64_t begin = blockIdx.x % groups * p.quantized.group, in = row * p.stride + begin;
  with_gate(p.activation, [&](auto activation) {
    quantize_group<N, HELD, kMostRowWarps>(p.quantized, blockIdx.x, 0, [&](int64_t column, int count, float (&y)[N]) {
      gated_vector<decltype(activation), X>(p, in + column, count, y);
    });
  });
}

template <typename X, int N, int HELD>
cudaError_t launch_quantized_rows(const QuantizedGates& p, cudaStream_t stream) {
  return launch_groups_of<N, HELD>(quantized_rows_kernel<X, N, HELD>, p, p.quantized.group,
                                   p.rows * (p.cols / p.quantized.group), stream);
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
  return is_held<N, kHeld, kMostRowWarps>(q.group) ? launch_quantized_rows<X, N, kHeld>(p, stream)
                                                   : launch_quantized_rows<X, N, 0>(p, stream);
}

Outcome run(const QuantizedGates& p, Stream stream) {
  return {with_dtype(p.gate.dtype, [&](auto x) { return run_gated_activation_quantized<decltype(x)>(p, stream); })};
}

}  // namespace jaxnorm::cuda
