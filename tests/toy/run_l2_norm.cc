// Runs the L2 norm on the host and compares with the formula in float64.
#include <cstdio>

#include "array.h"
#include "l2_norm.h"

namespace toy {
cudaError_t run(const L2NormForward& p, cudaStream_t stream);
cudaError_t run(const L2NormBackward& p, cudaStream_t stream);
}  // namespace toy

namespace {

using namespace jaxnorm;

int failures = 0;

void test(Dtype dtype, int64_t rows, int64_t cols, int64_t offset) {
  const auto x = Array::normal(dtype, rows * cols, offset);
  Array y(dtype, rows * cols, offset), rstd(Dtype::f32, rows);
  const bool holds = toy::run(toy::L2NormForward{rows, cols, x, y, rstd.floats(), 1e-6f}, nullptr) == cudaSuccess;
  std::vector<double> exact(rows * cols), exact_rstd(rows);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < cols; ++i) squares += double{x[row * cols + i]} * x[row * cols + i];
    exact_rstd[row] = 1 / std::sqrt(squares + 1e-6);
    for (int64_t i = 0; i < cols; ++i) exact[row * cols + i] = x[row * cols + i] * exact_rstd[row];
  }
  if (holds && y.error(exact) < (dtype == Dtype::f32 ? 1e-6 : 4e-3) && rstd.error(exact_rstd) < 1e-6) return;
  ++failures;
  std::printf("%s, %ld x %ld, offset %ld\n", dtype == Dtype::f32 ? "f32" : "bf16", rows, cols, offset);
}

void test_gradient(Dtype dtype, int64_t rows, int64_t cols, int64_t offset) {
  const auto x = Array::normal(dtype, rows * cols, offset), dy = Array::normal(dtype, rows * cols, offset);
  Array dx(dtype, rows * cols, offset), rstd(Dtype::f32, rows);
  std::vector<double> exact(rows * cols);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * cols;
    double squares = 0, product = 0;
    for (int64_t i = 0; i < cols; ++i) squares += double{x[at + i]} * x[at + i];
    const double scale = 1 / std::sqrt(squares);
    for (int64_t i = 0; i < cols; ++i) product += double{dy[at + i]} * x[at + i] * scale;
    for (int64_t i = 0; i < cols; ++i) exact[at + i] = scale * (dy[at + i] - x[at + i] * scale * product);
    rstd.set(row, static_cast<float>(scale));
  }
  const bool holds = toy::run(toy::L2NormBackward{rows, cols, dy, x, rstd.floats(), dx}, nullptr) == cudaSuccess;
  if (holds && dx.error(exact) < (dtype == Dtype::f32 ? 1e-6 : 4e-3)) return;
  ++failures;
  std::printf("gradient, %s, %ld x %ld, offset %ld\n", dtype == Dtype::f32 ? "f32" : "bf16", rows, cols, offset);
}

}  // namespace

int main() {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const int64_t cols : {1, 64, 100, 257, 1024, 4096, 12288, 40'000, 40'001, 300'000})
      for (const int64_t rows : {1, 37})
        for (const int64_t offset : {0, 1})
          if (rows * cols < 2'000'000) test(dtype, rows, cols, offset);
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const int64_t cols : {24, 64, 100, 257, 1024, 4096, 12'288, 40'000, 40'001})
      for (const int64_t rows : {1, 37, 300})
        for (const int64_t offset : {0, 1})
          if (rows * cols < 500'000) test_gradient(dtype, rows, cols, offset);
  std::printf("%d failures\n", failures);
  return failures > 0;
}
