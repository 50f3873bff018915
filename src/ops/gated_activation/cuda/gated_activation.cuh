// Gated activations. A thread takes vectors of the result that lie kGateThreads apart, wherever rows begin, and reads
// all of them before it computes.
#pragma once

#include "engine/cuda/launch.cuh"
#include "ops/gated_activation/cuda.h"
#include "ops/shared/cuda/activation.cuh"

namespace jaxnorm::cuda {

constexpr int kGateThreads = 256;

// Where a block's vectors are, of so many elements each, EACH of them for each thread.
template <int VECTOR, int EACH>
class GateTile {
 public:
  static constexpr int N = VECTOR, COUNT = EACH;

  GateTile() = default;
  __device__ explicit GateTile(const GatedShape& shape) : shape_(shape), vectors_(shape.cols / N) {
    const int64_t first = int64_t{blockIdx.x} * kVectors;
    row_ = first / vectors_;
    vector_ = first % vectors_ + threadIdx.x;
    left_ = shape.rows * vectors_ - first - threadIdx.x;
  }

  static int64_t blocks(const GatedShape& shape) { return (shape.rows * (shape.cols / N) + kVectors - 1) / kVectors; }

  // Calls f(i, at, in, count), with the places of the first elements in an array like y and in one like the gate, and
  // how many there are, N or none, for each of the thread's vectors.
  template <typename F>
  __device__ void each(F f) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      int64_t row = row_, vector = vector_ + i * kGateThreads;
      if (vector >= vectors_) {
        // Of rows that are not shorter than a block's part the next one, else any of the next ones.
        const int rows = vectors_ >= kVectors ? 1 : static_cast<int>(vector) / static_cast<int>(vectors_);
        row += rows;
        vector -= rows * vectors_;
      }
      f(i, row * shape_.cols + vector * N, row * shape_.stride + vector * N, i * kGateThreads < left_ ? N : 0);
    }
  }

 private:
  static constexpr int kVectors = kGateThreads * COUNT;

  GatedShape shape_;
  int64_t vectors_, row_, vector_, left_;  // of a row; the thread's first one, and how many are left from there
};

// Calls f with the activation as a type.
template <typename F>
__device__ void with_gate(Activation activation, F f) {
  switch (activation) {
    case Activation::silu:
      return f(Silu{});
    case Activation::sigmoid:
      return f(Sigmoid{});
    case Activation::relu2:
      return f(Relu2{});
    case Activation::gelu:
      return f(Gelu{});
    default:
      return f(GeluExact{});
  }
}

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

template <typename Tile, typename Op>
cudaError_t launch_gates(void (*kernel)(Op), const Op& p, cudaStream_t stream) {
  const int64_t blocks = Tile::blocks(p);
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  return blocks == 0 ? cudaSuccess : launch_grid(kernel, dim3(static_cast<unsigned>(blocks)), kGateThreads, stream, p);
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

}  // namespace jaxnorm::cuda
