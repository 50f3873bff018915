// The gradient of gated RMSNorm. With a = activation(gate), and h what was normalised,
//   gate first:  h = x * a,  u = dy,      dx = dh * a,  dgate = dh * x * a'
//   gate last:   h = x,      u = dy * a,  dx = dh,      dgate = h_hat * (scale + scale_offset) * dy * a'
// where dh and dscale follow from h and u as dx and dscale of the norm alone from x and dy.
#pragma once

#include "ops/norm/cuda/grad_row.cuh"
#include "ops/norm/cuda/grad_small_batch.cuh"
#include "ops/shared/cuda/activation.cuh"

namespace jaxnorm::cuda {

struct GatedState {
  const float* rstd;
  Activation activation;
  bool first;
  void* dgate;
};

// When the gate applies, as far as the compiler knows.
enum class Order : uint8_t { first, last, any };

// What dx and dgate are besides products of dh and h_hat: their last factors, and whether dgate has dh.
template <int N>
struct GateFactors {
  bool first;
  float of_dx[N], of_dgate[N];
};

// Stores a row of dx and of dgate, each if there is one.
template <typename Tile, typename X>
struct GatedResult {
  X *const dx, *const dgate;

  template <typename Factor>
  __device__ void store(const GateFactors<Tile::N>& factors, int, int64_t col, int remaining, float (&dh)[Tile::N],
                        const float (&h_hat)[Tile::N], const Factor& scale) const {
    float values[Tile::N];
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) {
      values[i] = (factors.first ? dh[i] : h_hat[i] * scale[i]) * factors.of_dgate[i];
      dh[i] *= factors.of_dx[i];
    }
    if (dx) cuda::store<Tile::ALIGNED>(dx + col, pack<X>(dh), remaining);
    if (dgate) cuda::store<Tile::ALIGNED>(dgate + col, pack<X>(values), remaining);
  }
};

template <typename X_, Order ORDER, Extra GATE>
struct GatedNormGrad : GatedState {
  using X = X_;
  using DY = X_;
  using State = GatedState;
  using Scalars = NormScalars<Kind::rms>;
  static constexpr int kWeights = 1;
  static constexpr Extra kExtra = GATE;
  static constexpr bool kTransforms = true;

  __device__ __host__ explicit GatedNormGrad(const State& state) : GatedState(state) {}

  __device__ void fetch(int64_t row, Scalars& s) const { s.rstd = rstd[row]; }

  // h and u of a vector, in place of x and dy. The order decides between factors, of which one is 1.
  template <int N>
  __device__ GateFactors<N> transform(float (&h)[N], float (&u)[N], const float (&gate)[N]) const {
    GateFactors<N> factors;
    factors.first = ORDER == Order::any ? first : ORDER == Order::first;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Activated a = activate_with_slope<X>(activation, gate[i]);
      factors.of_dx[i] = factors.first ? a.value : 1.0f;
      factors.of_dgate[i] = (factors.first ? h[i] : u[i]) * a.slope;
      h[i] *= factors.of_dx[i];
      u[i] *= factors.first ? 1.0f : a.value;
    }
    return factors;
  }

  __device__ __host__ bool has_result(const Output& dx) const { return dx.data || dgate; }

  template <typename Tile, typename Added, typename Place>
  __device__ GatedResult<Tile, X> result(const Output& dx, const Added&, const Place& at) const {
    return {dx.data ? at(dx.data) : nullptr, dgate ? at(dgate) : nullptr};
  }
};

template <typename X_, Order ORDER>
struct GatedWays {
  using X = X_;
  using DY = X_;
  using PipelinedExtra = GatedNormGrad<X, ORDER, Extra::pipelined>;
  using Pipelined = void;
  using PipelinedScalar = void;
  using Scalar = void;
  // What is rare has one kernel for both orders.
  using Vectors = GatedNormGrad<X, Order::any, Extra::in_memory>;
  using Elementwise = Vectors;
  template <typename R>
  using ElementwiseRegime = R;
};

// With a gate strips have much to compute, and not many threads to do it. `rows`: for each row of scale.
constexpr SmallBatchLimits kSmallGatedBatch{64, 1 << 19};

template <typename X>
cudaError_t gated_norm_grad_of(const GatedNormBackward& p, cudaStream_t stream) {
  if (p.cols > kGatedCols) return cudaErrorNotSupported;
  if (p.weight_rows.inner != 1) return cudaErrorInvalidValue;
  constexpr int N = kVector<X>;
  const Plan plan = make_gated_backward_plan(kDtype<X>, p.cols, current_device().max_cluster());
  const bool aligned = p.cols % N == 0 && are_aligned<N>(p.x, p.gate.data, p.dy, p.scale, p.dx, p.dgate,
                                                         Output{p.workspace.data, Dtype::f32});
  const GatedState state{p.rstd, p.gate.activation, p.gate.first, p.dgate.data};
  const GradCall<GatedState> call{p.rows, p.cols, p.dy, p.x, p.scale, p.gate.data, state, p.dx, p.scale_offset, 0};
  const SmallBatchLimits limits{kSmallGatedBatch.rows * p.weight_rows.count, kSmallGatedBatch.elements};
  if (aligned && is_small_batch(call, plan, p.weight_rows, limits) && plan.vectors <= kElements / N)
    return launch_small_batch<GatedNormGrad<X, Order::any, Extra::in_memory>>(
        busy_grad_regimes<X>(), call, plan, p.weight_rows, p.dscale, Output{}, stream);
  if (!p.dx && !p.dgate && !p.dscale) return cudaSuccess;

  GradRoom room;
  const GradNeeds needs{bool{p.dscale}, false, 0};
  cudaError_t error = make_room(p.workspace, needs, plan, kDtype<X>, p.rows, p.cols, p.weight_rows, room);
  const auto launch = [&](auto ways) {
    return launch_grad_rows<decltype(ways)>(busy_grad_regimes<X>(), call, plan, p.weight_rows, room, aligned, stream);
  };
  if (error == cudaSuccess && p.rows > 0)
    error = p.gate.first ? launch(GatedWays<X, Order::first>{}) : launch(GatedWays<X, Order::last>{});
  if (error != cudaSuccess || !p.dscale) return error;
  return sum_partials(room.partials, p.weight_rows.count * p.cols, p.dscale, Output{}, stream);
}

}  // namespace jaxnorm::cuda
