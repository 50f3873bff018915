// Runs the CUDA kernels for rows that are sharded over devices on the host: statistics against float64, and y bit for
// bit against the formula in f32.
//
//   run_shards                every shape
//   run_shards ROWS COLS      one shape
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "array.h"
#include "ops/norm/cuda.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

constexpr Dtype f32 = Dtype::f32, f16 = Dtype::f16, bf16 = Dtype::bf16;

int failures = 0;

const char* name_of(Dtype dtype) { return dtype == f32 ? "f32" : dtype == f16 ? "f16" : "bf16"; }
const char* name_of(Kind kind) { return kind == Kind::rms ? "rms" : "layer"; }

void expect_of(bool holds, const char* what, Kind kind, Dtype x, Dtype y, int64_t rows, int64_t cols, int64_t offset) {
  if (holds) return;
  ++failures;
  std::printf("%s: %s, x %s, y %s, %ld x %ld, offset %ld\n", what, name_of(kind), name_of(x), name_of(y), rows, cols,
              offset);
}

// Elements row * cols and on of an array of rows.
Input from_row(const Array& array, int64_t row, int64_t cols) {
  const Input whole = array;
  return {static_cast<const char*>(whole.data) + row * cols * size_of(whole.dtype), whole.dtype};
}

struct Statistics {
  Array mean, variance;

  Statistics(Kind kind, Input x, int64_t rows, int64_t cols) : mean(f32, rows), variance(f32, rows) {
    const ShardStatistics p{kind, rows, cols, x, kind == Kind::layer ? mean.floats() : nullptr, variance.floats()};
    if (run(p, nullptr) != cudaSuccess) ++failures;
  }
};

// x is about `center`.
void test_statistics(Kind kind, Dtype dtype, int64_t rows, int64_t cols, float center) {
  const auto expect = [&](bool holds, const char* what) { expect_of(holds, what, kind, dtype, dtype, rows, cols, 0); };
  auto x = Array::normal(dtype, rows * cols, 0);
  if (center != 0)
    for (int64_t i = 0; i < rows * cols; ++i) x.set(i, center + x[i]);
  const Statistics own(kind, x, rows, cols);
  for (int64_t row = 0; row < rows; ++row) {
    const auto mean_of = [&](auto f) {
      double sum = 0;
      for (int64_t i = 0; i < cols; ++i) sum += f(static_cast<double>(x[row * cols + i]));
      return sum / cols;
    };
    const double mean = kind == Kind::layer ? mean_of([](double v) { return v; }) : 0;
    const double variance = mean_of([&](double v) { return (v - mean) * (v - mean); });
    if (kind == Kind::layer) expect(std::abs(own.mean[row] - mean) <= 1e-6 * std::sqrt(mean * mean + variance), "mean");
    expect(std::abs(own.variance[row] - variance) <= (center == 0 ? 1e-6 : 1e-3) * variance, "variance");
  }
  // The same bits elsewhere in memory, and of a row by itself.
  Array elsewhere(dtype, rows * cols, 1);
  for (int64_t i = 0; i < rows * cols; ++i) elsewhere.set(i, x[i]);
  const Statistics others(kind, elsewhere, rows, cols);
  expect(own.variance == others.variance, "variance elsewhere");
  expect(kind == Kind::rms || own.mean == others.mean, "mean elsewhere");
  for (const int64_t row : {int64_t{0}, rows / 2, rows - 1}) {
    const Statistics alone(kind, from_row(x, row, cols), 1, cols);
    expect(alone.variance[0] == own.variance[row], "variance of a row alone");
    expect(kind == Kind::rms || alone.mean[0] == own.mean[row], "mean of a row alone");
  }
}

// Of three rows the second has the value: the others do not see it.
void test_special_values(Kind kind, Dtype dtype, int64_t cols) {
  const auto expect = [&](bool holds, const char* what) { expect_of(holds, what, kind, dtype, dtype, 3, cols, 0); };
  for (const float value : {INFINITY, -INFINITY, NAN, dtype == f16 ? 60000.0f : 1e30f})
    for (const int64_t at : {int64_t{0}, cols / 2, cols - 1}) {
      auto x = Array::normal(dtype, 3 * cols, 0);
      const Statistics before(kind, x, 3, cols);
      x.set(cols + at, value);
      const Statistics after(kind, x, 3, cols);
      for (const int64_t row : {0, 2}) expect(after.variance[row] == before.variance[row], "variance beside another");
      const float variance = after.variance[1];
      if (std::isnan(value) || (std::isinf(value) && kind == Kind::layer)) {
        expect(std::isnan(variance), "not a number");
      } else if (std::isinf(value) || value == 1e30f) {
        expect(cols == 1 && kind == Kind::layer ? variance == 0 : variance == INFINITY, "infinite variance");
      }
      if (kind == Kind::layer && std::isfinite(value))
        expect(std::abs(after.mean[1] * cols / x[cols + at] - 1) < 1e-2, "finite mean");
    }
}

struct Weights {
  Dtype scale = f32, bias = f32;
  bool has_scale = false, has_bias = false;
};

void test_apply(Kind kind, Dtype x_dtype, Dtype y_dtype, Weights weights, bool multiply_before_cast, int64_t rows,
                int64_t cols, int64_t offset) {
  const auto expect = [&](bool holds, const char* what) {
    expect_of(holds, what, kind, x_dtype, y_dtype, rows, cols, offset);
  };
  const bool layer = kind == Kind::layer;
  const auto x = Array::normal(x_dtype, rows * cols, offset);
  const auto scale = Array::normal(weights.scale, cols, offset), bias = Array::normal(weights.bias, cols, offset);
  auto mean = Array::normal(f32, rows, 0), rstd = Array::normal(f32, rows, 0);
  Array y(y_dtype, rows * cols, offset), expected(y_dtype, rows * cols, offset), rounded(y_dtype, 1);
  ShardApply p{};
  p.kind = kind, p.rows = rows, p.cols = cols, p.x = x, p.y = y, p.mean = layer ? mean.floats() : nullptr;
  p.rstd = rstd.floats(), p.scale_offset = 0.25f, p.multiply_before_cast = multiply_before_cast;
  if (weights.has_scale) p.scale = scale;
  if (weights.has_bias) p.bias = bias;
  expect(run(p, nullptr) == cudaSuccess, "apply");

  std::vector<double> exact(rows * cols);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t col = 0; col < cols; ++col) {
      const int64_t i = row * cols + col;
      float x_hat = (layer ? x[i] - mean[row] : x[i]) * rstd[row];
      if (!multiply_before_cast) {
        rounded.set(0, x_hat);
        x_hat = rounded[0];
      }
      const float factor = weights.has_scale ? scale[col] + 0.25f : 1;
      expected.set(i, weights.has_bias ? std::fma(x_hat, factor, bias[col]) : x_hat * factor);
      exact[i] = (x[i] - (layer ? double{mean[row]} : 0)) * rstd[row] * (weights.has_scale ? scale[col] + 0.25 : 1) +
                 (weights.has_bias ? bias[col] : 0);
    }
  expect(y == expected, "y");
  expect(cols == 1 || y.error(exact) < (y_dtype == f32 ? 1e-6 : 1e-2), "y in float64");
}

constexpr Dtype kPairs[][2] = {{f32, f32}, {bf16, bf16}, {f16, f16}, {f32, bf16}, {bf16, f32}, {f32, f16}, {f16, f32}};
constexpr Weights kWeights[] = {
    {f32, f32, true, true},  {f32, f32, false, false}, {bf16, f32, true, false}, {f32, f16, false, true},
    {f16, bf16, true, true}, {f16, f16, true, true},   {bf16, bf16, true, true}, {f32, f32, true, false},
};

void test_all(int64_t rows, int64_t cols) {
  static int turn = 0;
  for (const Kind kind : {Kind::rms, Kind::layer}) {
    for (const Dtype dtype : {f32, bf16, f16})
      for (const float center : {0.0f, 1e4f}) test_statistics(kind, dtype, rows, cols, center);
    for (const auto& [x, y] : kPairs) {
      const int64_t offset = turn / 8 % 2;
      test_apply(kind, x, y, kWeights[turn % std::size(kWeights)], turn / 2 % 2 == 0, rows, cols, offset);
      ++turn;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) {
    test_all(std::atoll(argv[1]), std::atoll(argv[2]));
  } else {
    for (const int64_t cols : {1, 7, 64, 257, 1024, 1025, 4096, 5000, 16'384, 40'000})
      for (const int64_t rows : {1, 3, 37}) test_all(rows, cols);
    test_all(5000, 24);  // several turns of a block's rows
    for (const Kind kind : {Kind::rms, Kind::layer}) {
      for (const Dtype dtype : {f32, bf16, f16})
        for (const int64_t cols : {1, 40, 1000, 40'000}) test_special_values(kind, dtype, cols);
      for (const auto& [x, y] : kPairs)
        for (const Weights& weights : kWeights)
          for (const bool multiply_before_cast : {false, true})
            for (const int64_t offset : {0, 1}) test_apply(kind, x, y, weights, multiply_before_cast, 3, 264, offset);
      if (run(ShardStatistics{kind, 0, 8}, nullptr) != cudaSuccess) ++failures;
      if (run(ShardApply{kind, 0, 8}, nullptr) != cudaSuccess) ++failures;
    }
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
