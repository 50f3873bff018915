// One row of the backward of a gated RMS norm. With a = activation(gate), and h what was normalised,
//   gate first:  h = x * a,  u = dy,      dx = dh * a,  dgate = dh * x * a'
//   otherwise:   h = x,      u = dy * a,  dx = dh,      dgate = h_hat * (scale + scale_offset) * dy * a'
// where dh and dscale follow from h and u as dx and dscale of the norm alone from x and dy.
#pragma once

#include "cuda/activation.cuh"
#include "cuda/backward_row.cuh"

namespace jaxnorm::cuda {

// The order decides between factors, of which one is 1.
template <typename X, typename W, Third THIRD>
struct GatedOperands {
  // What dx and dgate are besides products of dh and x_hat: their last factors, and whether dgate has dh.
  struct Rest {
    bool first;
    float of_dx[W::N], of_dgate[W::N];
  };
  Row<X, W> x, dy, gate;
  Gate how;

  __device__ Rest get(int slot, int64_t at, int left, float (&h)[W::N], float (&u)[W::N]) const {
    Rest rest;
    rest.first = THIRD == Third::gate ? how.first : THIRD == Third::gate_first;
    x.get(slot, at, left, h);
    dy.get(slot, at, left, u);
    gate.get(slot, at, left, rest.of_dx);
#pragma unroll
    for (int i = 0; i < W::N; ++i) {
      const Activated a = activate_with_slope<X>(how.activation, rest.of_dx[i]);
      rest.of_dx[i] = rest.first ? a.value : 1.0f;
      rest.of_dgate[i] = (rest.first ? h[i] : u[i]) * a.slope;
      h[i] *= rest.of_dx[i];
      u[i] *= rest.first ? 1.0f : a.value;
    }
    return rest;
  }
};

// Stores dx and dgate, each if it is wanted.
template <typename W, typename X>
class GatedResult {
 public:
  __device__ GatedResult(const Backward& p, int64_t row)
      : dx_(p.dx.data ? static_cast<X*>(p.dx.data) + row * p.cols : nullptr),
        dgate_(p.dgate.data ? static_cast<X*>(p.dgate.data) + row * p.cols : nullptr) {}

  template <typename Rest>
  __device__ void store(const Rest& rest, int, int64_t at, int left, float (&dh)[W::N], const float (&h_hat)[W::N],
                        const float (&factor)[W::N]) const {
    float dgate[W::N];
#pragma unroll
    for (int i = 0; i < W::N; ++i) {
      dgate[i] = (rest.first ? dh[i] : h_hat[i] * factor[i]) * rest.of_dgate[i];
      dh[i] *= rest.of_dx[i];
    }
    if (dx_) cuda::store<W::ALIGNED>(dx_ + at, pack<X>(dh), left);
    if (dgate_) cuda::store<W::ALIGNED>(dgate_ + at, pack<X>(dgate), left);
  }

 private:
  X *const dx_, *const dgate_;
};

}  // namespace jaxnorm::cuda
