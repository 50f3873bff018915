// Runs the CUDA kernels on the host with several rows of scale and bias, and compares: y and dx with those of a call
// for each head, bit for bit, dscale and dbias with the formulas in float64.
//
//   run_heads                             every way of sharing out rows
//   run_heads OUTER COUNT INNER COLS      one shape
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "array.h"
#include "cuda/engine/plan.h"
#include "exact.h"
#include "ops/norm/cuda.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

int failures = 0;

struct Shape {
  int64_t outer, count, inner, cols;

  int64_t rows() const { return outer * count * inner; }
  int64_t rows_of_head() const { return outer * inner; }
  int64_t row_of(int64_t head, int64_t i) const { return (i / inner * count + head) * inner + i % inner; }
};

// `rows` rows of `from`, the i-th of them row row_of(i).
template <typename F>
Array rows_of(const Array& from, Dtype dtype, int64_t rows, int64_t cols, int64_t offset, F row_of) {
  Array to(dtype, rows * cols, offset);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t col = 0; col < cols; ++col) to.set(i * cols + col, from[row_of(i) * cols + col]);
  return to;
}

// The results of a call forward and backward.
struct Specialised {
  Array y, mean, rstd, dx, dscale, dbias;
  bool holds;

  Specialised(Kind kind, Dtype dtype, const RowMap& weight_rows, int64_t rows, int64_t cols, int64_t offset,
              const Array& x, const Array& dy, Input dsum, Input scale, Input bias)
      : y(dtype, rows * cols, offset),
        mean(Dtype::f32, rows),
        rstd(Dtype::f32, rows),
        dx(dtype, rows * cols, offset),
        dscale(Dtype::f32, weight_rows.count * cols),
        dbias(Dtype::f32, weight_rows.count * cols) {
    NormForward f{};
    f.kind = kind, f.rows = rows, f.cols = cols, f.epsilon = 1e-6f, f.scale_offset = 0.5f, f.weight_rows = weight_rows;
    f.multiply_before_cast = kind == Kind::layer;
    f.x = x, f.scale = scale, f.bias = bias, f.y = y, f.y_stride = cols, f.mean = mean.floats(), f.rstd = rstd.floats();
    const WorkspaceSize size = norm_grad_workspace({dtype, cols, bias ? 2 : 1, weight_rows, true});
    Array workspace(Dtype::f32, rows * size.floats_a_row + size.floats);
    NormBackward b{};
    b.kind = kind, b.rows = rows, b.cols = cols, b.scale_offset = 0.5f, b.weight_rows = weight_rows;
    b.mean = f.mean, b.rstd = f.rstd, b.x = x, b.dy = dy, b.dsum = dsum, b.scale = scale;
    b.workspace = workspace.workspace(), b.dy_stride = cols, b.dx = dx, b.dscale = dscale;
    if (bias) b.dbias = dbias;
    holds = run(f, nullptr) == cudaSuccess && run(b, nullptr) == cudaSuccess;
  }
};

void test(Kind kind, Dtype dtype, Dtype weights, const Shape& shape, int64_t offset, bool adds) {
  const bool layer = kind == Kind::layer;
  const auto& [outer, count, inner, cols] = shape;
  const auto expect = [&](bool holds, const char* what) {
    if (holds) return;
    ++failures;
    std::printf("%s: %s, %s, weights %s, %ld x %ld x %ld x %ld, offset %ld, dsum %d\n", what, layer ? "layer" : "rms",
                dtype == Dtype::f32 ? "f32" : "bf16", weights == Dtype::f32 ? "f32" : "bf16", outer, count, inner, cols,
                offset, adds);
  };
  const auto x = Array::normal(dtype, shape.rows() * cols, offset);
  const auto dy = Array::normal(dtype, shape.rows() * cols, offset);
  const auto dsum = Array::normal(dtype, shape.rows() * cols, offset);
  const auto scale = Array::normal(weights, count * cols, offset), bias = Array::normal(weights, count * cols, offset);
  const auto call = [&](const RowMap& weight_rows, int64_t rows, auto& x, auto& dy, auto& dsum, auto& scale,
                        auto& bias) {
    return Specialised(kind, dtype, weight_rows, rows, cols, offset, x, dy, adds ? Input(dsum) : Input(), scale,
                       layer ? Input(bias) : Input());
  };
  const Specialised all = call({count, inner}, shape.rows(), x, dy, dsum, scale, bias);
  expect(all.holds, "a call");

  // A branch's scale for each head: as the norm of the sum that it gives.
  const auto branch_scale = Array::normal(weights, count * cols, offset);
  Array sum(dtype, shape.rows() * cols, offset), total(dtype, shape.rows() * cols, offset);
  for (int64_t i = 0; i < shape.rows() * cols; ++i) {
    const int64_t row = i / cols;
    const float product = branch_scale[row / inner % count * cols + i % cols] * x[i];
    total.set(i, product + dsum[i]);
  }
  Array y(dtype, shape.rows() * cols, offset), fused_y(dtype, shape.rows() * cols, offset);
  ScaledAddNormForward f{};
  f.kind = kind, f.rows = shape.rows(), f.cols = cols, f.epsilon = 1e-6f, f.weight_rows = {count, inner};
  f.multiply_before_cast = true, f.x = total, f.scale = scale, f.y = y, f.y_stride = cols;
  if (layer) f.bias = bias;
  expect(run(f, nullptr) == cudaSuccess, "the norm of a sum");
  f.x = x, f.addend = dsum, f.sum = sum, f.y = fused_y, f.branch_scale = branch_scale;
  expect(run(f, nullptr) == cudaSuccess && sum == total && fused_y == y, "a branch's scale");

  for (int64_t i = 0; i < shape.rows() * cols; ++i) total.set(i, x[i] + dsum[i]);
  f.x = total, f.addend = {}, f.y = y, f.branch_scale = {};
  expect(run(f, nullptr) == cudaSuccess, "the norm of a sum");
  f.x = x, f.addend = dsum, f.y = fused_y;
  expect(run(f, nullptr) == cudaSuccess && sum == total && fused_y == y, "a sum");

  std::vector<double> dscale, dbias;
  for (int64_t head = 0; head < count; ++head) {
    const auto of_head = [&](const Array& array, Dtype dtype) {
      return rows_of(array, dtype, shape.rows_of_head(), cols, offset,
                     [&](int64_t i) { return shape.row_of(head, i); });
    };
    const auto row = [&](const Array& array) {
      return rows_of(array, weights, 1, cols, offset, [&](int64_t) { return head; });
    };
    const auto own_x = of_head(x, dtype), own_dy = of_head(dy, dtype), own_scale = row(scale), own_bias = row(bias);
    const auto own_dsum = of_head(dsum, dtype);
    const Specialised own = call({}, shape.rows_of_head(), own_x, own_dy, own_dsum, own_scale, own_bias);
    expect(own.holds && of_head(all.y, dtype) == own.y, "y");
    expect(of_head(all.dx, dtype) == own.dx, "dx");
    const Exact exact(layer, shape.rows_of_head(), cols, own_x, own_scale, 0.5, own_bias, own_dy, own_dy);
    dscale.insert(dscale.end(), exact.dscale.begin(), exact.dscale.end());
    dbias.insert(dbias.end(), exact.dbias.begin(), exact.dbias.end());
  }
  expect(cols == 1 || all.dscale.error(dscale) < 5e-6, "dscale");  // of one column it is next to nothing
  expect(!layer || all.dbias.error(dbias) < 5e-6, "dbias");
}

void test_all(const Shape& shape, int64_t offset = 0) {
  constexpr Dtype f32 = Dtype::f32, bf16 = Dtype::bf16;
  tier.begin_shape();
  bool adds = false;
  for (const Kind kind : {Kind::rms, Kind::layer}) {
    adds = !adds;
    if (tier.takes()) test(kind, f32, f32, shape, offset, adds);
    if (tier.takes()) test(kind, bf16, bf16, shape, offset, adds);
    if (tier.takes()) test(kind, bf16, f32, shape, offset, !adds);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 5) {
    test_all({std::atoll(argv[1]), std::atoll(argv[2]), std::atoll(argv[3]), std::atoll(argv[4])});
  } else {
    // Few rows, whose sums are of one kernel.
    for (const int64_t cols : {1, 64, 128, 256, 257, 1024})
      for (const int64_t count : {3, 8}) {
        test_all({5, count, 1, cols});
        test_all({2, count, 5, cols});
      }
    test_all({2, 40, 1, 64}, 1);
    // More: heads that divide a group of rows, that do not, and more of them than a group has; neighbouring rows in one
    // part and in several; rows enough for a second turn of each thread group.
    for (const int64_t cols : {64, 128}) {
      for (const int64_t count : {1, 3, 32, 40, 100}) test_all({1000 / count, count, 1, cols});
      for (const int64_t count : {1, 3, 40}) test_all({2, count, 600 / count, cols});
    }
    test_all({60, 3, 5, 64});
    test_all({3000, 3, 1, 64});
    test_all({1, 2, 4500, 64});
    for (const int64_t cols : {256, 257, 1024}) {
      test_all({70, 8, 1, cols});
      test_all({2, 8, 35, cols});
    }
    test_all({70, 8, 1, 128}, 1);
    for (const int64_t cols : {768, 1152, 1536}) test_all({70, 8, 1, cols});
    test_all({1, 3, 171, 1536});
    // Examples, whose rows lie together, in pipelines: two of a warp, one of a block, one of a cluster.
    for (const int64_t cols : {64, 1152, 8192}) test_all({1, 3, cols == 64 ? 640 : 136, cols});
    test_all({133, 5, 1, 1152});  // of which a turn of all blocks has more partial sums with dsum than without
    test_all({1, 150, 4, 256});   // more heads than blocks run at once
    test_all({4, 139, 1, 256});
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
