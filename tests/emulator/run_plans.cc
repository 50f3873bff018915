// Checks that every plan of the backward and of rotary embedding has a kernel, a regime with as many threads, vectors
// and blocks, and that those of logits have room for their rows.
#include <cstdio>
#include <initializer_list>

#include "engine/cuda/grad_regimes.cuh"
#include "ops/cross_entropy/call.h"
#include "ops/norm/cuda.h"
#include "ops/norm/gated.h"
#include "ops/qk_norm_rotary/cuda/rotary.cuh"
#include "ops/softmax/call.h"

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
    const Plan plan = make_plan(Way::backward, KIND, kDtype<X>, cols, max_cluster);
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

template <typename X>
void test_rotary(int64_t cols, int64_t dim, bool interleaved) {
  const RotaryTiling tiling = make_rotary_tiling(kDtype<X>, cols, dim, interleaved);
  const auto is_that = [&](auto tile) {
    using Tile = decltype(tile);
    const bool is = Tile::N == tiling.vector && Tile::LANES == tiling.lanes && Tile::VECTORS == 2 * tiling.units;
    return is && Tile::N * Tile::LANES * Tile::VECTORS >= cols ? cudaSuccess : cudaErrorInvalidValue;
  };
  for (const bool aligned : {false, true}) {
    if (with_pair_tiling<X>(tiling, aligned, is_that) == cudaSuccess) continue;
    ++failures;
    std::printf("rotary: no kernel for rows of %ld elements of %zu bytes, %ld turned\n", cols, sizeof(X), dim);
  }
}

// Tiles have every head, and sums of as many blocks as there are have room.
void test_head_tiles(int64_t q_heads, int64_t k_heads, int64_t inner, int64_t cols) {
  const int groups = make_rotary_tiling(Dtype::bf16, cols, cols, false).groups();
  const HeadTiles q = make_head_tiles(q_heads, inner, groups), k = make_head_tiles(k_heads, inner, groups);
  for (const bool q_apart : {false, true})
    for (const bool k_apart : {false, true}) {
      QkNormRotaryBackward p{};
      p.tokens = 100'000 * inner;
      p.q.has_scale_per_head = q_apart, p.k.has_scale_per_head = k_apart;
      const GradPlan plan = make_rotary_grad_plan(p, q, k, kRotaryGradBlocks);
      const int64_t rows = std::max(q_apart ? q_heads : 1, k_apart ? k_heads : 1);
      const int64_t room = qk_norm_rotary_grad_workspace({Dtype::bf16, cols, 2, {rows, 1}, true}).floats;
      const bool holds = q.count * q.heads >= q_heads && k.count * k.heads >= k_heads && q.heads * q.tokens == groups &&
                         plan.q.floats(cols) + plan.k.floats(cols) <= room;
      if (holds) continue;
      ++failures;
      std::printf("tiles of %ld and %ld heads of %ld elements, inner %ld\n", q_heads, k_heads, cols, inner);
    }
}

// Rows of logits have one block, which has room for the row or streams it.
template <typename X>
void test_logits(int64_t cols) {
  for (const Plan& plan : {make_one_block_plan(kDtype<X>, cols), make_window_plan(kDtype<X>, cols)}) {
    const int64_t room = int64_t{plan.vectors} * plan.threads_per_row * kVector<X>;
    if (plan.blocks_per_row == 1 && (plan.vectors == kStreamed || room >= cols)) continue;
    ++failures;
    std::printf("logits: no plan for rows of %ld elements of %zu bytes\n", cols, sizeof(X));
  }
}

}  // namespace

int main() {
  for (int64_t cols = 1; cols < 1 << 21; cols += 1 + cols / 64) {
    test_logits<float>(cols);
    test_logits<__nv_bfloat16>(cols);
  }
  for (int64_t cols = 2; cols <= kRotaryCols; ++cols)
    for (int64_t dim = 2; dim <= cols; dim += 2)
      for (const bool interleaved : {false, true}) {
        test_rotary<float>(cols, dim, interleaved);
        test_rotary<__nv_bfloat16>(cols, dim, interleaved);
      }
  for (const int64_t cols : {48, 64, 100, 128, 256, 512})
    for (const int64_t heads : {1, 2, 3, 5, 8, 9, 12, 31, 32, 40, 64, 128, 3000})
      for (const int64_t k_heads : {1, 2, 7, 8, 32, 500})
        for (const int64_t inner : {1, 7}) test_head_tiles(heads, k_heads, inner, cols);

  for (int max_cluster = 1; max_cluster <= kMaxCluster; max_cluster *= 2)
    for (int64_t cols = 1; cols < 1'500'000; cols += cols < 40'000 ? 1 : 997) {
      test<float>(cols, max_cluster);
      test<__nv_bfloat16>(cols, max_cluster);
    }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
