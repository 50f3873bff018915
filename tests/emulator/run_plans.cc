// Checks that every plan of the backward has a kernel: a regime with as many threads, vectors and blocks.
#include <cstdio>
#include <initializer_list>

#include "cuda/engine/grad_regimes.cuh"
#include "ops/gated_norm.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

int failures = 0;

template <typename X, typename... R>
void expect_regime(const char* what, RegimeList<R...> regimes, const Plan& plan, int64_t cols, int max_cluster) {
  int found = 0;
  const cudaError_t error = with_regime(regimes, plan, [&](auto regime) {
    found = decltype(regime)::kMost;
    return cudaSuccess;
  });
  const bool has_room = plan.threads_per_row * plan.vectors * plan.blocks_per_row * int64_t{kVector<X>} >= cols;
  if (error == cudaSuccess && found >= plan.block_threads() && has_room) return;
  ++failures;
  std::printf("%s: no kernel for rows of %ld elements of %zu bytes, clusters of up to %d\n", what, cols, sizeof(X),
              max_cluster);
}

template <typename X>
void test(int64_t cols, int max_cluster) {
  const auto test_kind = [&](auto kind) {
    constexpr Kind KIND = decltype(kind)::value;
    const Plan plan = make_plan(Op::backward, KIND, kDtype<X>, cols, max_cluster);
    if (plan.segments > 0) return;  // these have kernels for any length
    for (const Plan& each : {plan, beside_extra_operand(plan)}) {
      expect_regime<X>("norm", grad_regimes<KIND, X>(), each, cols, max_cluster);
      if (plan.blocks_per_row == 1)
        expect_regime<X>("small batch", small_batch_regimes<X>(grad_regimes<KIND, X>()), each, cols, max_cluster);
    }
  };
  test_kind(std::integral_constant<Kind, Kind::rms>{});
  test_kind(std::integral_constant<Kind, Kind::layer>{});
  if (cols > kGatedCols) return;
  const Plan plan = make_gated_backward_plan(kDtype<X>, cols, max_cluster);
  expect_regime<X>("gated", busy_grad_regimes<X>(), plan, cols, max_cluster);
  if (plan.blocks_per_row == 1 && plan.vectors * kVector<X> <= kElements)
    expect_regime<X>("gated small batch", small_batch_regimes<X>(busy_grad_regimes<X>()), plan, cols, max_cluster);
}

}  // namespace

int main() {
  for (int max_cluster = 1; max_cluster <= kMaxCluster; max_cluster *= 2)
    for (int64_t cols = 1; cols < 1'500'000; cols += cols < 40'000 ? 1 : 997) {
      test<float>(cols, max_cluster);
      test<__nv_bfloat16>(cols, max_cluster);
    }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
