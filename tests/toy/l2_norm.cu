// The CUDA kernels of the L2 norm: its functors, and their launches.
#include "l2_norm.h"
#include "ops/norm/cuda/grad_loop.cuh"
#include "ops/shared/cuda/load.cuh"
#include "ops/shared/cuda/stats.cuh"

namespace toy {
namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

struct Norm : SquareSum {
  struct Statistics {
    float rstd;
  };
  template <typename Whole>
  __device__ static Statistics finish(const L2NormForward& p, const Whole& whole, float) {
    return {reciprocal_sqrt(whole.value[0] + p.epsilon)};
  }
  __device__ static void write(const L2NormForward& p, const Statistics& s, int64_t row) {
    if (p.rstd) p.rstd[row] = s.rstd;
  }
};

// For both loops.
template <typename X, typename Tile>
struct Scale : RowEpilogue {
  template <typename... Args>
  __device__ Scale(const Args&...) {}
  __device__ void arrive(const L2NormForward&) {}

  template <typename Group, typename Rows>
  __device__ void finish(const L2NormForward& p, const RowsLaunch& launch, const Group& group, const Rows& rows) const {
    for (int r = 0; r < Rows::kRows && rows.is_there(r); ++r)
      finish<void>(p, launch, group, rows.s[r], rows.row(r), rows.x[r]);
  }
  template <typename Load, typename Group, typename Row>
  __device__ void finish(const L2NormForward& p, const RowsLaunch&, const Group& group, Norm::Statistics s, int64_t row,
                         const Row& x) const {
    for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
      float values[Tile::N];
      x.get(vec, col, remaining, values);
      for (float& value : values) value *= s.rstd;
      store<Tile::ALIGNED>(static_cast<X*>(p.y.data) + row * p.cols + col, pack<X>(values), remaining);
    });
  }
};

template <typename X>
struct L2NormOp : RowOp<X, Norm> {
  using Params = L2NormForward;
  template <typename Tile>
  using Load = LoadRow<X, Tile>;
  template <typename R, typename Tile>
  using Epilogue = Scale<X, Tile>;
  template <typename R, typename Tile>
  using PipelinedEpilogue = Scale<X, Tile>;
};

template <typename X>
cudaError_t run_as(const L2NormForward& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const Plan plan = make_forward_plan(/*centred=*/false, kDtype<X>, p.cols, current_device().max_cluster());
  return with_regime<ForwardRegimes<sizeof(X)>>(plan, [&](auto regime) {
    RowsLaunch launch(plan, p.cols, N, {});
    return RowLauncher<L2NormOp<X>, decltype(regime)>{p, plan, launch, stream}.run(p.cols % N == 0 &&
                                                                                   are_aligned<N>(p.x, p.y));
  });
}

struct GradState {
  const float* rstd;
};

struct GradScalars {
  static constexpr int kSums = 1;
  float rstd = 0;

  __device__ float x_hat(float x) const { return x * rstd; }
  __device__ GradScalars within(int remaining) const { return {remaining > 0 ? rstd : 0.0f}; }

  struct Dx {
    float rstd, sum;
    __device__ float operator()(float dy, float y) const { return rstd * fmaf(-y, sum, dy); }
  };
  __device__ Dx dx(const Sums<1>& sums, float) const { return {rstd, sums.value[0]}; }
};

template <typename T>
struct L2NormGradOp : DxGrad<T> {
  using DY = T;
  static constexpr int kWeights = 0;
  static constexpr Extra kExtra = Extra::absent;
  using State = GradState;
  using Scalars = GradScalars;
  const GradState state;

  __device__ explicit L2NormGradOp(const GradState& state) : state(state) {}
  __device__ void fetch(int64_t row, GradScalars& s) const { s.rstd = state.rstd[row]; }
};

// One functor goes every way.
template <typename Op>
struct L2NormWays {
  using X = typename Op::X;
  using DY = typename Op::DY;
  using Pipelined = Op;
  using PipelinedExtra = void;
  using PipelinedScalar = Op;
  using Vectors = Op;
  using Scalar = Op;
  using Elementwise = Op;
  template <typename R>
  using ElementwiseRegime = R;
};

template <typename X>
cudaError_t run_as(const L2NormBackward& p, cudaStream_t stream) {
  const Plan plan = make_backward_plan(kDtype<X>, p.cols, current_device().max_cluster());
  if (plan.segments > 0) return cudaErrorNotSupported;
  GradRoom room;
  const cudaError_t error = make_room({}, {false, false, 0}, plan, kDtype<X>, p.rows, p.cols, {}, room);
  if (error != cudaSuccess || p.rows == 0) return error;
  const GradCall<GradState> call{p.rows, p.cols, p.dy, p.x, {}, {}, {p.rstd}, p.dx, 0, 0};
  const bool aligned = p.cols % kVector<X> == 0 && are_aligned<kVector<X>>(p.dy, p.x, p.dx);
  return launch_grad_rows<L2NormWays<L2NormGradOp<X>>>(grad_regimes<X>(), call, plan, {}, room, aligned, stream);
}

template <typename P>
cudaError_t run_for_dtype(const P& p, cudaStream_t stream) {
  return p.x.dtype == Dtype::f32 ? run_as<float>(p, stream) : run_as<__nv_bfloat16>(p, stream);
}

}  // namespace

cudaError_t run(const L2NormForward& p, cudaStream_t stream) { return run_for_dtype(p, stream); }
cudaError_t run(const L2NormBackward& p, cudaStream_t stream) { return run_for_dtype(p, stream); }

}  // namespace toy
