// One row of the backward of a gated RMS norm. With a = activation(gate), and h what was normalised,
//   gate first:  h = x * a,  u = dy,      dx = dh * a,  dgate = dh * x * a'
//   otherwise:   h = x,      u = dy * a,  dx = dh,      dgate = h_hat * (scale + scale_offset) * dy * a'
// where dh and dscale follow from h and u as dx and dscale of the norm alone from x and dy.
#pragma once

#include "cuda/ops/activation.cuh"
#include "cuda/ops/backward_row.cuh"

namespace jaxnorm::cuda {

// What dx and dgate are besides products of dh and x_hat: their last factors, and whether dgate has dh.
template <int N>
struct GateFactors {
  bool first;
  float of_dx[N], of_dgate[N];
};

// h and u of a vector, in place of x and dy. The order decides between factors, of which one is 1.
template <typename X, int N>
__device__ GateFactors<N> apply_gate(Activation activation, bool first, float (&h)[N], float (&u)[N],
                                     const float (&gate)[N]) {
  GateFactors<N> rest;
  rest.first = first;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Activated a = activate_with_slope<X>(activation, gate[i]);
    rest.of_dx[i] = first ? a.value : 1.0f;
    rest.of_dgate[i] = (first ? h[i] : u[i]) * a.slope;
    h[i] *= rest.of_dx[i];
    u[i] *= first ? 1.0f : a.value;
  }
  return rest;
}

template <typename X, typename Tile, Extra EXTRA>
struct GatedOperands {
  Row<X, Tile> x, dy, gate;
  Gate how;

  __device__ GateFactors<Tile::N> get(int slot, int64_t at, int left, float (&h)[Tile::N], float (&u)[Tile::N]) const {
    float values[Tile::N];
    x.get(slot, at, left, h);
    dy.get(slot, at, left, u);
    gate.get(slot, at, left, values);
    return apply_gate<X>(how.activation, EXTRA == Extra::gate ? how.first : EXTRA == Extra::gate_first, h, u, values);
  }
};

// Stores a row of dx and of dgate, each if there is one.
template <typename Tile, typename X>
class GatedResult {
 public:
  __device__ GatedResult(X* dx, X* dgate) : dx_(dx), dgate_(dgate) {}

  template <typename Rest>
  __device__ void store(const Rest& rest, int, int64_t at, int left, float (&dh)[Tile::N],
                        const float (&h_hat)[Tile::N], const float (&factor)[Tile::N]) const {
    float dgate[Tile::N];
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) {
      dgate[i] = (rest.first ? dh[i] : h_hat[i] * factor[i]) * rest.of_dgate[i];
      dh[i] *= rest.of_dx[i];
    }
    if (dx_) cuda::store<Tile::ALIGNED>(dx_ + at, pack<X>(dh), left);
    if (dgate_) cuda::store<Tile::ALIGNED>(dgate_ + at, pack<X>(dgate), left);
  }

 private:
  X *const dx_, *const dgate_;
};

}  // namespace jaxnorm::cuda
