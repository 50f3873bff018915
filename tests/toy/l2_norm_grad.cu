#include "cuda/engine/grad_launch.cuh"
#include "l2_norm_grad.h"

namespace toy {
namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

struct State {
  const float* rnorm;
};

struct Scalars {
  static constexpr int kSums = 1;
  float rnorm = 0;

  __device__ float x_hat(float x) const { return x * rnorm; }
  __device__ Scalars for_sums() const { return *this; }

  struct Dx {
    float rnorm, sum;
    __device__ float operator()(float dy, float y) const { return rnorm * fmaf(-y, sum, dy); }
  };
  __device__ Dx dx(const Sums<1>& sums, float) const { return {rnorm, sums.value[0]}; }
};

template <typename T>
struct Op : WeightlessGrad<T> {
  using State = toy::State;
  using Scalars = toy::Scalars;
  const State state;

  __device__ explicit Op(const State& state) : state(state) {}
  __device__ void fetch(int64_t row, Scalars& s) const { s.rnorm = state.rnorm[row]; }
};

template <typename X>
cudaError_t run_as(const L2NormGrad& p, cudaStream_t stream) {
  const Plan plan = make_plan(cuda::Op::backward, Kind::rms, kDtype<X>, p.cols, current_device().max_cluster());
  if (plan.segments > 0) return cudaErrorNotSupported;
  GradRoom room;
  const cudaError_t error = make_room({}, {false, false, 0}, plan, kDtype<X>, p.rows, p.cols, {}, room);
  if (error != cudaSuccess || p.rows == 0) return error;
  const GradCall<State> call{p.rows, p.cols, p.dy, p.x, {}, {}, {p.rnorm}, p.dx, 0, 0};
  const bool aligned = p.cols % kVector<X> == 0 && are_aligned<kVector<X>>(p.dy, p.x, p.dx);
  return launch_grad_rows<OneTypeWays<Op<X>>>(grad_regimes<Kind::rms, X>(), call, plan, {}, room, aligned, stream);
}

}  // namespace

cudaError_t run(const L2NormGrad& p, cudaStream_t stream) {
  return p.x.dtype == Dtype::f32 ? run_as<float>(p, stream) : run_as<__nv_bfloat16>(p, stream);
}

}  // namespace toy
