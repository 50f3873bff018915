#include "cuda/ops/load.cuh"
#include "cuda/ops/stats.cuh"
#include "l2_norm.h"

namespace toy {
namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

struct Norm : SquareSum {
  struct Statistics {
    float rnorm;
  };
  template <typename Whole>
  __device__ static Statistics finish(const L2Norm& p, const Whole& whole, float) {
    return {reciprocal_sqrt(whole.value[0] + p.epsilon)};
  }
  __device__ static void write(const L2Norm& p, const Statistics& s, int64_t row) {
    if (p.rnorm) p.rnorm[row] = s.rnorm;
  }
};

// For both loops.
template <typename X, typename Tile>
struct Scale : RowEpilogue {
  template <typename... Args>
  __device__ Scale(const Args&...) {}
  __device__ void arrive(const L2Norm&) {}

  template <typename Group, typename Rows>
  __device__ void finish(const L2Norm& p, const RowsLaunch& launch, const Group& group, const Rows& rows) const {
    for (int r = 0; r < Rows::kRows && rows.is_there(r); ++r)
      finish<void>(p, launch, group, rows.s[r], rows.row(r), rows.x[r]);
  }
  template <typename Load, typename Group, typename Row>
  __device__ void finish(const L2Norm& p, const RowsLaunch&, const Group& group, Norm::Statistics s, int64_t row,
                         const Row& x) const {
    for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
      float values[Tile::N];
      x.get(vec, col, remaining, values);
      for (float& value : values) value *= s.rnorm;
      store<Tile::ALIGNED>(static_cast<X*>(p.y.data) + row * p.cols + col, pack<X>(values), remaining);
    });
  }
};

template <typename X>
struct L2NormOp : RowOp<X, Norm> {
  using Params = L2Norm;
  template <typename Tile>
  using Load = LoadRow<X, Tile>;
  template <typename R, typename Tile>
  using Epilogue = Scale<X, Tile>;
  template <typename R, typename Tile>
  using PipelinedEpilogue = Scale<X, Tile>;
};

template <typename X>
cudaError_t run_as(const L2Norm& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const Plan plan = make_plan(jaxnorm::cuda::Op::forward, Kind::rms, kDtype<X>, p.cols, current_device().max_cluster());
  return with_regime<ForwardRegimes<sizeof(X)>>(plan, [&](auto regime) {
    RowsLaunch launch(plan, p.cols, N, {});
    return RowLauncher<L2NormOp<X>, decltype(regime)>{p, plan, launch, stream}.run(p.cols % N == 0 &&
                                                                                   are_aligned<N>(p.x, p.y));
  });
}

}  // namespace

cudaError_t run(const L2Norm& p, cudaStream_t stream) {
  return p.x.dtype == Dtype::f32 ? run_as<float>(p, stream) : run_as<__nv_bfloat16>(p, stream);
}

}  // namespace toy
