// Gated activations. A thread takes vectors of the result that lie kGateThreads apart, wherever rows begin, and reads
// all of them before it computes.
#include "engine/cuda/device.h"
#include "ops/gated_activation/cuda/gate_tile.cuh"

namespace jaxnorm::cuda {

template <typename X, typename Tile>
__global__ void __launch_bounds__(kGateThreads) gated_activation_kernel(GatedActivationForward p) {
  constexpr int N = Tile::N;
  const Tile tile(p);
  Packed<X, N> gate[Tile::COUNT], up[Tile::COUNT];
  tile.each([&](int i, int64_t, int64_t in, int count) {
    gate[i] = load<true, N>(static_cast<const X*>(p.gate.data) + in, count);
    up[i] = load<true, N>(static_cast<const X*>(p.up.data) + in, count);
  });
  with_gate(p.activation, [&](auto activation) {
    using A = decltype(activation);
    tile.each([&](int i, int64_t at, int64_t, int count) {
      float y[N], factor[N];
      unpack(gate[i], y);
      unpack(up[i], factor);
#pragma unroll
      for (int k = 0; k < N; ++k) y[k] = A::template of<X>(y[k]) * factor[k];
      store<true>(static_cast<X*>(p.y.data) + at, pack<X>(y), count);
    });
  });
}

template <typename X, typename Tile>
__global__ void __launch_bounds__(kGateThreads) gated_activation_grad_kernel(GatedActivationBackward p) {
  constexpr int N = Tile::N;
  const Tile tile(p);
  Packed<X, N> dy[Tile::COUNT], gate[Tile::COUNT], up[Tile::COUNT];
  tile.each([&](int i, int64_t at, int64_t in, int count) {
    dy[i] = load<true, N>(static_cast<const X*>(p.dy.data) + at, count);
    gate[i] = load<true, N>(static_cast<const X*>(p.gate.data) + in, count);
    up[i] = load<true, N>(static_cast<const X*>(p.up.data) + in, p.dgate.data ? count : 0);
  });
  with_gate(p.activation, [&](auto activation) {
    using A = decltype(activation);
    tile.each([&](int i, int64_t, int64_t in, int count) {
      float dup[N], v[N], dgate[N];
      unpack(dy[i], dup);
      unpack(gate[i], v);
      unpack(up[i], dgate);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const Activated activated = A::template with_slope<X>(v[k]);
        dgate[k] = A::through(dup[k] * dgate[k] * activated.slope, v[k]);
        dup[k] *= activated.value;
      }
      store<true>(static_cast<X*>(p.dgate.data) + in, pack<X>(dgate), p.dgate.data ? count : 0);
      store<true>(static_cast<X*>(p.dup.data) + in, pack<X>(dup), p.dup.data ? count : 0);
    });
  });
}

// Calls f with a tile of 16-byte vectors or, where these do not divide rows or arrays are not aligned, of elements.
template <typename X, int VECTORS, int ELEMENTS, typename F, typename... Arrays>
cudaError_t with_tile(const GatedShape& shape, F f, const Arrays&... arrays) {
  constexpr int N = kVector<X>;
  const bool is_aligned = shape.cols % N == 0 && are_aligned<N>(arrays...);
  return is_aligned ? f(GateTile<N, VECTORS>{}) : f(GateTile<1, ELEMENTS>{});
}

template <typename X>
cudaError_t run_gated_activation(const GatedActivationForward& p, cudaStream_t stream) {
  return with_tile<X, 1, 4>(
      p,
      [&](auto tile) {
        using Tile = decltype(tile);
        return launch_gates<Tile>(gated_activation_kernel<X, Tile>, p, stream);
      },
      p.gate, p.up, p.y);
}

template <typename X>
cudaError_t run_gated_activation_grad(const GatedActivationBackward& p, cudaStream_t stream) {
  return with_tile<X, 1, 4>(
      p,
      [&](auto tile) {
        using Tile = decltype(tile);
        return launch_gates<Tile>(gated_activation_grad_kernel<X, Tile>, p, stream);
      },
      p.dy, p.gate, p.up, p.dgate, p.dup);
}

Outcome run(const GatedActivationForward& p, Stream stream) {
  return {with_dtype(p.y.dtype, [&](auto x) { return run_gated_activation<decltype(x)>(p, stream); })};
}

Outcome run(const GatedActivationBackward& p, Stream stream) {
  return {with_dtype(p.dy.dtype, [&](auto x) { return run_gated_activation_grad<decltype(x)>(p, stream); })};
}

}  // namespace jaxnorm::cuda
