// Runs the CUDA kernels of gradients on the host with workspaces of other sizes than they want, as those of programs
// that were exported by another build: results stay right, and in larger ones they stay the same bits.
//
//   run_workspace              every way of using a workspace
//   run_workspace ROWS COLS    one shape
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "array.h"
#include "cuda/engine/grad_schedule.h"
#include "ops/norm/cuda.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

constexpr Dtype kF32 = Dtype::f32, kBf16 = Dtype::bf16;
int failures = 0;

struct Results {
  Array dx, dgate, dscale, dbias;

  Results(Dtype dtype, int64_t elements, int64_t weights)
      : dx(dtype, elements), dgate(dtype, elements), dscale(kF32, weights), dbias(kF32, weights) {}

  bool operator==(const Results& r) const {
    return dx == r.dx && dgate == r.dgate && dscale == r.dscale && dbias == r.dbias;
  }
};

std::vector<double> values_of(const Array& array, int64_t count) {
  std::vector<double> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = array[i];
  return values;
}

// `call(results, floats)` runs an op in a workspace of so many floats; it wants `wanted` and makes do with `least`.
// `in_segments`: whether dx may be of another order of sums.
template <typename F>
void test(const char* what, Dtype dtype, int64_t rows, int64_t cols, int64_t weights, int64_t wanted, int64_t least,
          bool in_segments, F call) {
  const auto expect = [&](bool holds, const char* which, int64_t floats) {
    if (holds) return;
    ++failures;
    std::printf("%s: %s, %s, %ld x %ld, %ld of %ld floats\n", which, what, dtype == kF32 ? "f32" : "bf16", rows, cols,
                floats, wanted);
  };
  Results all(dtype, rows * cols, weights);
  expect(call(all, wanted) == cudaSuccess, "the size that is wanted", wanted);
  Results more(dtype, rows * cols, weights);
  expect(call(more, 2 * wanted + 3) == cudaSuccess && more == all, "a larger one", 2 * wanted + 3);
  const auto dx = values_of(all.dx, rows * cols), dscale = values_of(all.dscale, weights),
             dbias = values_of(all.dbias, weights);
  for (const int64_t floats : {least, least + 1, (least + wanted) / 2, wanted - 1}) {
    if (floats < least || floats >= wanted) continue;
    Results fewer(dtype, rows * cols, weights);
    expect(call(fewer, floats) == cudaSuccess, "a smaller one", floats);
    expect(in_segments ? fewer.dx.error(dx) < (dtype == kF32 ? 1e-6 : 1e-3) : fewer.dx == all.dx, "dx", floats);
    expect(fewer.dgate == all.dgate, "dgate", floats);
    expect(fewer.dscale.error(dscale) < 1e-6, "dscale", floats);
    expect(std::isnan(dbias[0]) || fewer.dbias.error(dbias) < 1e-6, "dbias", floats);
  }
  if (least > 0) expect(call(more, least - 1) == cudaErrorMemoryAllocation, "too small a one", least - 1);
}

void test_norm(Kind kind, Dtype dtype, int64_t rows, int64_t cols, RowMap weight_rows) {
  const auto x = Array::normal(dtype, rows * cols, 0), dy = Array::normal(dtype, rows * cols, 0);
  const auto scale = Array::normal(kF32, weight_rows.count * cols, 0);
  Array mean(kF32, rows), rstd(kF32, rows);
  for (int64_t row = 0; row < rows; ++row) mean.set(row, 0.01f), rstd.set(row, 1.1f);
  const int weights = kind == Kind::layer ? 2 : 1;
  // Alone neither small batches, which need no workspace, nor rows in segments.
  const Plan plan = make_plan(Way::backward, kind, dtype, cols, kMaxCluster);
  const bool in_segments = plan.segments > 0 && (plan.blocks_per_row == 1 || dtype != kF32);
  const WorkspaceSize size = norm_grad_workspace({dtype, cols, weights, weight_rows, true});
  const int64_t partials = weights * least_partial_rows(weight_rows, plan.rows_per_block) * weight_rows.count * cols;
  test(kind == Kind::rms ? "rms" : "layer", dtype, rows, cols, weight_rows.count * cols,
       rows * size.floats_a_row + size.floats, partials + (in_segments ? 2 * rows : 0), in_segments,
       [&](Results& results, int64_t floats) {
         Array workspace(kF32, floats);
         NormBackward b{};
         b.kind = kind, b.rows = rows, b.cols = cols, b.dy_stride = cols, b.weight_rows = weight_rows;
         b.x = x, b.dy = dy, b.scale = scale, b.mean = mean.floats(), b.rstd = rstd.floats();
         b.dx = results.dx, b.dscale = results.dscale, b.workspace = workspace.workspace();
         if (kind == Kind::layer) b.dbias = results.dbias;
         return cuda::run(b, nullptr);
       });
}

void test_gated(Dtype dtype, int64_t rows, int64_t cols, RowMap weight_rows) {
  const auto x = Array::normal(dtype, rows * cols, 0), dy = Array::normal(dtype, rows * cols, 0);
  const auto gate = Array::normal(dtype, rows * cols, 0), scale = Array::normal(kF32, weight_rows.count * cols, 0);
  Array rstd(kF32, rows);
  for (int64_t row = 0; row < rows; ++row) rstd.set(row, 1.1f);
  const WorkspaceSize size = gated_norm_grad_workspace({dtype, cols, 1, weight_rows, true});
  const Plan plan = make_gated_backward_plan(dtype, cols, kMaxCluster);
  test("gated", dtype, rows, cols, weight_rows.count * cols, size.floats,
       least_partial_rows(weight_rows, plan.rows_per_block) * weight_rows.count * cols, false,
       [&](Results& results, int64_t floats) {
         Array workspace(kF32, floats);
         GatedNormBackward b{};
         b.rows = rows, b.cols = cols, b.weight_rows = weight_rows, b.x = x, b.dy = dy, b.scale = scale;
         b.gate.data = gate, b.rstd = rstd.floats();
         b.dx = results.dx, b.dgate = results.dgate, b.dscale = results.dscale, b.workspace = workspace.workspace();
         return cuda::run(b, nullptr);
       });
}

void test_all(int64_t rows, int64_t cols, RowMap weight_rows = {}) {
  for (const Dtype dtype : {kF32, kBf16})
    for (const Kind kind : {Kind::rms, Kind::layer}) test_norm(kind, dtype, rows, cols, weight_rows);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) {
    test_all(std::atoll(argv[1]), std::atoll(argv[2]));
  } else {
    for (const int64_t cols : {64, 256, 1024}) test_all(1200, cols);
    test_all(1000, 64, {40, 1});  // of which a block has rows of several weights
    test_all(1000, 128, {3, 1});
    test_all(1200, 64, {3, 20});  // neighbours
    test_all(3, 40'000);          // clusters
    test_all(3, 300'000);         // segments, or a cluster that reads a row twice
    for (const Dtype dtype : {kF32, kBf16}) {
      test_gated(dtype, 700, 256, {});
      test_gated(dtype, 1600, 128, {8, 1});
    }
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
