// Runs the L2 norm on the host and compares with the formula in float64.
#include <cstdio>

#include "array.h"
#include "l2_norm.h"

namespace {

using namespace jaxnorm;

int failures = 0;

void test(Dtype dtype, int64_t rows, int64_t cols, int64_t offset) {
  const auto x = Array::normal(dtype, rows * cols, offset);
  Array y(dtype, rows * cols, offset), rnorm(Dtype::f32, rows);
  const bool holds = toy::run({rows, cols, x, y, rnorm.floats(), 1e-6f}, nullptr) == cudaSuccess;
  std::vector<double> exact(rows * cols), exact_rnorm(rows);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < cols; ++i) squares += double{x[row * cols + i]} * x[row * cols + i];
    exact_rnorm[row] = 1 / std::sqrt(squares + 1e-6);
    for (int64_t i = 0; i < cols; ++i) exact[row * cols + i] = x[row * cols + i] * exact_rnorm[row];
  }
  if (holds && y.error(exact) < (dtype == Dtype::f32 ? 1e-6 : 4e-3) && rnorm.error(exact_rnorm) < 1e-6) return;
  ++failures;
  std::printf("%s, %ld x %ld, offset %ld\n", dtype == Dtype::f32 ? "f32" : "bf16", rows, cols, offset);
}

}  // namespace

int main() {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const int64_t cols : {1, 64, 100, 257, 1024, 4096, 12288, 40'000, 40'001, 300'000})
      for (const int64_t rows : {1, 37})
        for (const int64_t offset : {0, 1})
          if (rows * cols < 2'000'000) test(dtype, rows, cols, offset);
  std::printf("%d failures\n", failures);
  return failures > 0;
}
