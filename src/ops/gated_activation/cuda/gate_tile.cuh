// What the kernels of gated activations share: where a thread's vectors are, and the activation as a type.
#pragma once

#include "engine/cuda/launch.cuh"
#include "ops/gated_activation/call.h"
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

template <typename Tile, typename Op>
cudaError_t launch_gates(void (*kernel)(Op), const Op& p, cudaStream_t stream) {
  const int64_t blocks = Tile::blocks(p);
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  return blocks == 0 ? cudaSuccess : launch_grid(kernel, dim3(static_cast<unsigned>(blocks)), kGateThreads, stream, p);
}

}  // namespace jaxnorm::cuda
