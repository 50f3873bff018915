// Runs the product of matrices that begin anywhere on the host, and compares with float64.
#include <cuda_fp8.h>

#include <cstdio>
#include <random>
#include <string>

#include "array.h"
#include "cuda/ops.h"

namespace {

using namespace jaxnorm;

int failures = 0;

// Random 8-bit floats, `offset` bytes behind a word, and what they are.
struct Matrix {
  Matrix(Dtype dtype, int64_t elements, int64_t offset) : bytes(elements + offset + 32), values(elements) {
    static std::mt19937 random;
    std::normal_distribution<float> draw;
    const auto format = dtype == Dtype::f8e5m2 ? __NV_E5M2 : __NV_E4M3;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(bytes.data());
    uint8_t* const at = bytes.data() + (16 - begin % 16) % 16 + offset;
    for (int64_t i = 0; i < elements; ++i) {
      at[i] = __nv_cvt_float_to_fp8(draw(random), __NV_SATFINITE, format);
      values[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(at[i], format)));
    }
    input = {at, dtype};
  }

  std::vector<uint8_t> bytes;
  std::vector<double> values;
  Input input;
};

void test(Dtype x_dtype, Dtype weights_dtype, Dtype y_dtype, int64_t rows, int64_t cols, int64_t depth, bool has_bias,
          int64_t offset) {
  const Matrix x(x_dtype, rows * depth, offset), weights(weights_dtype, cols * depth, offset);
  auto x_scales = Array::normal(Dtype::f32, rows, offset), weight_scales = Array::normal(Dtype::f32, cols, offset);
  const auto bias = Array::normal(y_dtype, cols, offset);
  Array y(y_dtype, rows * cols, offset);
  QuantizedDot p{};
  p.rows = rows, p.cols = cols, p.depth = depth, p.x = x.input, p.weights = weights.input, p.y = y;
  p.x_scales = x_scales.floats(), p.weight_scales = weight_scales.floats();
  if (has_bias) p.bias = bias;
  const bool launched = cuda::unaligned_dot(p, nullptr) == cudaSuccess;
  std::vector<double> exact(rows * cols);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t col = 0; col < cols; ++col) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k) sum += x.values[row * depth + k] * weights.values[col * depth + k];
      exact[row * cols + col] = sum * x_scales[row] * weight_scales[col] + (has_bias ? bias[col] : 0);
    }
  const double allowed = y_dtype == Dtype::f32 ? 1e-6 : y_dtype == Dtype::f16 ? 5e-4 : 4e-3;
  if (launched && y.error(exact) < allowed) return;
  ++failures;
  std::printf("%ld x %ld by %ld, offset %ld: error %g\n", rows, depth, cols, offset, y.error(exact));
}

}  // namespace

int main() {
  for (const Dtype y : {Dtype::f32, Dtype::f16, Dtype::bf16})
    for (const bool has_bias : {false, true}) {
      if (has_bias && y == Dtype::f32) continue;
      test(Dtype::f8e4m3fn, Dtype::f8e4m3fn, y, 1, 16, 16, has_bias, 1);
      test(Dtype::f8e4m3fn, Dtype::f8e5m2, y, 33, 48, 80, has_bias, 3);
      test(Dtype::f8e5m2, Dtype::f8e4m3fn, y, 16, 32, 256, has_bias, 0);
    }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
