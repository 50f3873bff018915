// Multiplies matrices that begin anywhere by way of copies, on the host, and compares with float64. What multiplies the
// copies is this program.
#include <cuda_fp8.h>

#include <cstdio>
#include <random>
#include <string>

#include "array.h"
#include "ops/quantized_dot/cuda/copied_dot.h"

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

bool begins_at_a_word(const void* array) { return reinterpret_cast<uintptr_t>(array) % kDotMultiple == 0; }

double value_of(const Input& matrix, int64_t i) {
  const auto format = matrix.dtype == Dtype::f8e5m2 ? __NV_E5M2 : __NV_E4M3;
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<const uint8_t*>(matrix.data)[i], format)));
}

// Of arrays that begin at words, within these bytes.
std::string multiply(const QuantizedDot& p, const char* room, int64_t bytes) {
  const char* const end = reinterpret_cast<const char*>(p.x_scales + p.rows);
  for (const void* array : {p.x.data, static_cast<const void*>(p.x_scales), p.weights.data,
                            static_cast<const void*>(p.weight_scales), p.bias.data, static_cast<const void*>(p.y.data)})
    if (!begins_at_a_word(array)) return "a copy begins between words";
  if (static_cast<const char*>(p.y.data) < room || end > room + bytes) return "a copy is not in the room";
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t col = 0; col < p.cols; ++col) {
      double sum = 0;
      for (int64_t k = 0; k < p.depth; ++k)
        sum += value_of(p.x, row * p.depth + k) * value_of(p.weights, col * p.depth + k);
      sum *= static_cast<double>(p.x_scales[row]) * p.weight_scales[col];
      if (p.bias) sum += __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias.data)[col]);
      const int64_t at = row * p.cols + col;
      if (p.y.dtype == Dtype::f32) {
        static_cast<float*>(p.y.data)[at] = sum;
      } else {
        static_cast<__nv_bfloat16*>(p.y.data)[at] = __float2bfloat16(sum);
      }
    }
  return "";
}

// Returns how many blocks it took, or 0 where it could not.
int test(Dtype y_dtype, int64_t rows, int64_t cols, int64_t depth, bool has_bias, int64_t offset, int64_t bytes) {
  const Matrix x(Dtype::f8e4m3fn, rows * depth, offset), weights(Dtype::f8e5m2, cols * depth, offset);
  auto x_scales = Array::normal(Dtype::f32, rows, offset), weight_scales = Array::normal(Dtype::f32, cols, offset);
  const auto bias = Array::normal(y_dtype, cols, offset);
  Array y(y_dtype, rows * cols, offset), room(Dtype::f32, bytes / 4);
  QuantizedDot p{};
  p.rows = rows, p.cols = cols, p.depth = depth, p.x = x.input, p.weights = weights.input, p.y = y;
  p.x_scales = x_scales.floats(), p.weight_scales = weight_scales.floats();
  if (has_bias) p.bias = bias;
  char* const begin = reinterpret_cast<char*>(room.floats());
  int blocks = 0;
  const std::string why = cuda::CopiedDot(p, {begin, bytes}, nullptr).run([&](const QuantizedDot& block) {
    ++blocks;
    return multiply(block, begin, bytes);
  });
  if (!why.empty() && blocks == 0 && why.find("no room") != std::string::npos) return 0;
  std::vector<double> exact(rows * cols);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t col = 0; col < cols; ++col) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k) sum += x.values[row * depth + k] * weights.values[col * depth + k];
      exact[row * cols + col] = sum * x_scales[row] * weight_scales[col] + (has_bias ? bias[col] : 0);
    }
  if (why.empty() && y.error(exact) < (y_dtype == Dtype::f32 ? 1e-6 : 4e-3)) return blocks;
  ++failures;
  std::printf("%ld x %ld by %ld, offset %ld, %ld bytes: %s, error %g\n", rows, depth, cols, offset, bytes, why.c_str(),
              y.error(exact));
  return blocks;
}

void expect(int blocks, int expected) {
  if (blocks == expected) return;
  ++failures;
  std::printf("%d blocks, expected %d\n", blocks, expected);
}

}  // namespace

int main() {
  for (const int64_t offset : {0, 1, 3}) {
    expect(test(Dtype::f32, 1, 16, 16, false, offset, 1 << 16), 1);
    expect(test(Dtype::bf16, 33, 48, 80, true, offset, 1 << 16), 1);
    // Shares of 2048 bytes have 16 columns of 80, and 24 rows of them.
    expect(test(Dtype::bf16, 33, 48, 80, true, offset, 3 * 2048), 6);
    expect(test(Dtype::f32, 33, 48, 80, false, offset, 3 * 2048), 6);
    expect(test(Dtype::f32, 33, 48, 80, false, offset, 3 * 1024), 0);
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
