// Runs the gradient of the L2 norm on the host and compares with the formula in float64.
#include <cstdio>

#include "array.h"
#include "l2_norm_grad.h"

namespace {

using namespace jaxnorm;

int failures = 0;

void test(Dtype dtype, int64_t rows, int64_t cols, int64_t offset) {
  const auto x = Array::normal(dtype, rows * cols, offset), dy = Array::normal(dtype, rows * cols, offset);
  Array dx(dtype, rows * cols, offset), rnorm(Dtype::f32, rows);
  std::vector<double> exact(rows * cols);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * cols;
    double squares = 0, product = 0;
    for (int64_t i = 0; i < cols; ++i) squares += double{x[at + i]} * x[at + i];
    const double scale = 1 / std::sqrt(squares);
    for (int64_t i = 0; i < cols; ++i) product += double{dy[at + i]} * x[at + i] * scale;
    for (int64_t i = 0; i < cols; ++i) exact[at + i] = scale * (dy[at + i] - x[at + i] * scale * product);
    rnorm.set(row, static_cast<float>(scale));
  }
  const bool holds = toy::run({rows, cols, dy, x, rnorm.floats(), dx}, nullptr) == cudaSuccess;
  if (holds && dx.error(exact) < (dtype == Dtype::f32 ? 1e-6 : 4e-3)) return;
  ++failures;
  std::printf("%s, %ld x %ld, offset %ld\n", dtype == Dtype::f32 ? "f32" : "bf16", rows, cols, offset);
}

}  // namespace

int main() {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const int64_t cols : {24, 64, 100, 257, 1024, 4096, 12'288, 40'000, 40'001})
      for (const int64_t rows : {1, 37, 300})
        for (const int64_t offset : {0, 1})
          if (rows * cols < 500'000) test(dtype, rows, cols, offset);
  std::printf("%d failures\n", failures);
  return failures > 0;
}
