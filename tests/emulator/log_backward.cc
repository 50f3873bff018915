// Writes down the accesses of RMSNorm's backward: see accesses.h, and tests/test_plan_page.py.
#include "accesses.h"
//
#include "array.h"
#include "ops/norm/cuda/norm_grad_launch.cuh"

namespace jaxnorm::cuda {

// It has no access of a row.
cudaError_t sum_partials(const Partials&, int64_t, Output, Output, cudaStream_t) { return cudaSuccess; }

}  // namespace jaxnorm::cuda

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

// Few rows of one block would have kernels of a small batch: here they go the way of many.
template <typename X>
cudaError_t run_as_many(const NormBackward& p, const Plan& plan) {
  const GradCall<NormState> call{p.rows, p.cols, p.dy, p.x, p.scale, {}, {p.mean, p.rstd}, p.dx, 0, 0};
  GradRoom room;
  const cudaError_t error = make_room(p.workspace, {true, false, 0}, plan, kDtype<X>, p.rows, p.cols, {}, room);
  const bool aligned = p.cols % kVector<X> == 0;
  if (error != cudaSuccess) return error;
  return launch_grad_rows<NormWays<Kind::rms, X, X>>(grad_regimes<Kind::rms, X>(), call, plan, {}, room, aligned,
                                                     nullptr);
}

template <typename X>
cudaError_t run(int64_t rows, int64_t cols) {
  constexpr Dtype dtype = kDtype<X>;
  const int64_t elements = rows * cols;
  // Whatever their values are, the accesses are these.
  const Array x(dtype, elements), dy(dtype, elements), scale(dtype, cols);
  Array dx(dtype, elements), dscale(Dtype::f32, cols), rstd(Dtype::f32, rows);
  const Plan plan = make_plan(Way::backward, Kind::rms, dtype, cols, kMaxCluster);
  const WorkspaceSize size = grad_workspace({dtype, cols, 1, {}, true}, {plan, beside_extra_operand(plan)});
  Array workspace(Dtype::f32, rows * size.floats_a_row + size.floats);
  NormBackward p{};
  p.kind = Kind::rms, p.rows = rows, p.cols = cols, p.rstd = rstd.floats();
  p.x = x, p.dy = dy, p.scale = scale, p.dy_stride = cols, p.dx = dx, p.dscale = dscale;
  p.workspace = workspace.workspace();
  accesses::add(p.x, elements, 0);
  accesses::add({p.dx.data, dtype}, elements, 1);
  accesses::add(p.dy, elements, 2);
  const bool is_of_one_block = plan.blocks_per_row == 1 && plan.segments == 0;
  return is_of_one_block ? run_as_many<X>(p, plan) : launch_norm_grad<Kind::rms, X, X>(p, nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  return accesses::run_cases(argc, argv, [](const std::string& type, int64_t rows, int64_t cols) {
    return type == "rms-float32" ? run<float>(rows, cols) : run<__nv_bfloat16>(rows, cols);
  });
}
