// Writes down the accesses of the forward of RMSNorm and LayerNorm: see accesses.h, and tests/test_plan_page.py.
#include "accesses.h"
//
#include "array.h"
#include "ops/norm/cuda/norm.cuh"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

template <typename STATS, typename X>
cudaError_t run(int64_t rows, int64_t cols) {
  constexpr Kind kind = STATS::kCentred ? Kind::layer : Kind::rms;
  // Whatever their values are, the accesses are these.
  const Array x(kDtype<X>, rows * cols), scale(kDtype<X>, cols);
  Array y(kDtype<X>, rows * cols), tickets(Dtype::f32, 1);
  NormForward p{};
  p.kind = kind, p.rows = rows, p.cols = cols, p.epsilon = 1e-6f, p.multiply_before_cast = true;
  p.x = x, p.scale = scale, p.y = y, p.y_stride = cols, p.workspace = {tickets.floats(), 1};
  accesses::add(p.x, rows * cols, 0);
  accesses::add({p.y.data, p.y.dtype}, rows * cols, 1);
  const Plan plan = make_plan(Way::forward, kind, kDtype<X>, cols, kMaxCluster);
  return with_regime<ForwardRegimes<sizeof(X)>>(plan, [&](auto regime) {
    return NormLauncher<STATS, X, decltype(regime)>(p, plan, nullptr).run(VaryingWeights<X, STATS::kCentred>{});
  });
}

}  // namespace

int main(int argc, char** argv) {
  return accesses::run_cases(argc, argv, [](const std::string& type, int64_t rows, int64_t cols) {
    if (type == "rms-float32") return run<MeanSquare, float>(rows, cols);
    if (type == "layer-float32") return run<MeanVariance, float>(rows, cols);
    return run<MeanSquare, __nv_bfloat16>(rows, cols);
  });
}
