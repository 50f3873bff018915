// Runs the CUDA kernels on the host with epsilon = 0 on rows whose squares are below the smallest number, and compares
// with the formula in float32: where results and gradients are finite, infinite of which sign, and not a number.
#include <cmath>
#include <cstdio>
#include <initializer_list>

#include "array.h"
#include "cuda/engine/plan.h"
#include "ops/norm/cuda.h"
#include "ops/softmax/cuda.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

int failures = 0;

bool are_alike(float a, float b) {
  return std::isfinite(a) ? std::isfinite(b) : std::isnan(a) ? std::isnan(b) : a == b;
}

// The formula of one row.
struct Formula {
  float mean = 0, rstd, mean_g = 0, mean_gx = 0;

  Formula(bool layer, const Array& x, const Array& dy, int64_t at, int64_t cols) {
    double sum = 0;
    for (int64_t i = 0; layer && i < cols; ++i) sum += x[at + i];
    mean = static_cast<float>(sum / cols);
    float squares = 0, g = 0, gx = 0;
    for (int64_t i = 0; i < cols; ++i) squares += (x[at + i] - mean) * (x[at + i] - mean);
    rstd = 1 / std::sqrt(squares / cols);
    for (int64_t i = 0; i < cols; ++i) g += dy[at + i], gx += dy[at + i] * x_hat(x[at + i]);
    if (layer) mean_g = g / cols;
    mean_gx = gx / cols;
  }

  float x_hat(float x) const { return (x - mean) * rstd; }
  float dx(float x, float dy) const { return rstd * (dy - x_hat(x) * mean_gx - mean_g); }
};

// Every other row is such a row. Where the signs of dy are those of x_hat the sums are infinite, elsewhere they are not
// numbers.
void test(Kind kind, Dtype dtype, int64_t rows, int64_t cols, bool with_dbias) {
  const bool layer = kind == Kind::layer;
  Array x(dtype, rows * cols), dy(dtype, rows * cols), y(dtype, rows * cols), dx(dtype, rows * cols);
  for (int64_t i = 0; i < rows * cols; ++i) {
    const int64_t row = i / cols, col = i % cols;
    const float value = col % 3 == 0 ? 4 : 1;
    x.set(i, row % 2 ? value * 1e-25f : value);
    dy.set(i, layer && col % 3 && row % 4 == 1 ? -1 : 1);
  }
  Array mean(Dtype::f32, rows), rstd(Dtype::f32, rows), dscale(Dtype::f32, cols), dbias(Dtype::f32, cols);
  NormForward f{};
  f.kind = kind, f.rows = rows, f.cols = cols, f.multiply_before_cast = true;
  f.x = x, f.y = y, f.y_stride = cols, f.mean = mean.floats(), f.rstd = rstd.floats();
  const WorkspaceSize size = norm_grad_workspace({dtype, cols, 2, {}, true});
  Array workspace(Dtype::f32, rows * size.floats_a_row + size.floats);
  NormBackward b{};
  b.kind = kind, b.rows = rows, b.cols = cols, b.mean = f.mean, b.rstd = f.rstd, b.x = x, b.dy = dy;
  b.dy_stride = cols, b.dx = dx, b.workspace = workspace.workspace();
  if (with_dbias) b.dbias = dbias;
  bool holds = run(f, nullptr) == cudaSuccess && run(b, nullptr) == cudaSuccess;
  for (int64_t row = 0; row < rows && holds; ++row) {
    const int64_t at = row * cols;
    const Formula formula(layer, x, dy, at, cols);
    for (int64_t i = at; i < at + cols; ++i)
      holds = holds && are_alike(formula.x_hat(x[i]), y[i]) && are_alike(formula.dx(x[i], dy[i]), dx[i]);
  }
  if (holds) return;
  ++failures;
  std::printf("%s, %s, %ld x %ld, dbias %d\n", layer ? "layer" : "rms", dtype == Dtype::f32 ? "f32" : "bf16", rows,
              cols, with_dbias);
}

}  // namespace

int main() {
  for (const Kind kind : {Kind::rms, Kind::layer})
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      for (const bool with_dbias : {false, true}) {
        for (const int64_t cols : {5, 16, 17, 64, 100, 257, 1021, 1056, 5376}) test(kind, dtype, 4, cols, with_dbias);
        for (const int64_t cols : {64, 100}) test(kind, dtype, 600, cols, with_dbias);
        for (const int64_t cols : {40000, 40001, 131076, 140001, 300000}) test(kind, dtype, 2, cols, with_dbias);
      }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
