// Runs the CUDA kernels that round to float8 on the host and compares scales and values with the arithmetic of
// `Quantization`, bit for bit.
#include <cstdio>
#include <initializer_list>

#include "array.h"
#include "ops/float8_linear/cuda.h"
#include "ops/shared/quantization.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

constexpr Dtype kF32 = Dtype::f32;
int failures = 0;

struct Case {
  Dtype dtype;
  int64_t rows, cols;
  bool folds, power_of_two;

  void expect(bool holds, const char* what) const {
    if (holds) return;
    ++failures;
    std::printf("%s: %s, %ld x %ld, fold %d, powers of two %d\n", what, dtype == kF32 ? "f32" : "half", rows, cols,
                folds, power_of_two);
  }
};

float scale_of(float amax, bool power_of_two) {
  if (amax == 0) return 0;
  float scale = amax / 448;
  if (power_of_two && std::isfinite(scale)) scale = std::exp2(std::ceil(std::log2(scale)));
  return std::isnan(amax) ? amax : std::max(scale, kSmallestScale);
}

bool is_same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// Of `count` lines of `length` elements each: element i of a line is v(line, i), and its code code(line, i).
template <typename V, typename Code>
void check(const Case& c, const Array& scales, int64_t count, int64_t length, V v, Code code) {
  for (int64_t line = 0; line < count; ++line) {
    float amax = 0;
    for (int64_t i = 0; i < length; ++i)
      if (!std::isnan(amax) && !(std::fabs(v(line, i)) <= amax)) amax = std::fabs(v(line, i));
    const float scale = scale_of(amax, c.power_of_two), reciprocal = 1 / (scale == 0 ? 1 : scale);
    if (!is_same(scales[line], scale)) return c.expect(false, "scale");
    for (int64_t i = 0; i < length; ++i)
      if (code(line, i) != __nv_cvt_float_to_fp8(v(line, i) * reciprocal, __NV_SATFINITE, __NV_E4M3))
        return c.expect(false, "values");
  }
}

void test(const Case& c, int64_t offset) {
  Array x = Array::normal(c.dtype, c.rows * c.cols, offset), by_row(kF32, c.rows), by_col(kF32, c.cols, offset);
  for (int64_t row = 0; row < c.rows; ++row) by_row.set(row, std::exp2(row % 7 - 3.0f) * 1.1f);
  for (int64_t col = 0; col < c.cols; ++col) by_col.set(col, std::exp2(col % 5 - 2.0f) * 0.9f);
  if (c.rows > 3 && c.cols > 3)
    for (int64_t i = 0; i < std::max(c.rows, c.cols); ++i) {  // a row and a column of zeros
      if (i < c.cols) x.set(c.cols + i, 0);
      if (i < c.rows) x.set(i * c.cols + 2, 0);
    }
  if (c.rows > 5 && c.cols > 40) x.set(4 * c.cols + 39, NAN), x.set(5 * c.cols + 38, INFINITY);

  const auto by_rows = [&](int64_t row, int64_t i) { return x[row * c.cols + i] * (c.folds ? by_col[i] : 1.0f); };
  const auto by_columns = [&](int64_t col, int64_t i) { return x[i * c.cols + col]; };
  const auto by_columns_folded = [&](int64_t col, int64_t i) { return by_columns(col, i) * (c.folds ? by_row[i] : 1); };

  Array values(Dtype::s8, c.rows * c.cols, offset), scales(kF32, c.rows);
  RoundRows r{};
  r.rows = c.rows, r.cols = c.cols, r.x = x, r.factors = c.folds ? by_col.floats() : nullptr;
  r.scales = scales.floats(), r.power_of_two = c.power_of_two, r.values = values;
  c.expect(run(r, nullptr) == cudaSuccess, "rows");
  check(c, scales, c.rows, c.cols, by_rows, [&](int64_t row, int64_t i) { return values.byte(row * c.cols + i); });

  Array again(Dtype::s8, c.rows * c.cols, offset), transposed(Dtype::s8, c.rows * c.cols, offset);
  Array column_scales(kF32, c.cols), workspace(kF32, round_columns_workspace({c.dtype, c.cols}).floats);
  RoundColumns p{};
  p.rows = c.rows, p.cols = c.cols, p.x = x;
  p.scales = column_scales.floats(), p.power_of_two = c.power_of_two, p.values = again, p.transposed = transposed;
  p.workspace = workspace.workspace();
  c.expect(run(p, nullptr) == cudaSuccess, "columns");
  check(c, column_scales, c.cols, c.rows, by_columns,
        [&](int64_t col, int64_t i) { return again.byte(i * c.cols + col); });
  check(c, column_scales, c.cols, c.rows, by_columns,
        [&](int64_t col, int64_t i) { return transposed.byte(col * c.rows + i); });

  Array back(Dtype::s8, c.rows * c.cols, offset);
  const auto bytes = [](Array& array) { return reinterpret_cast<uint8_t*>(array.floats()); };
  c.expect(run(TransposeBytes{c.cols, c.rows, bytes(transposed), bytes(back)}, nullptr) == cudaSuccess, "transpose");
  for (int64_t i = 0; i < c.rows * c.cols; ++i)
    if (back.byte(i) != again.byte(i)) return c.expect(false, "transposed bytes");

  for (const bool with_values : {true, false}) {
    Array column_values(Dtype::s8, c.rows * c.cols, offset);
    RoundGradient g{};
    g.rows = c.rows, g.cols = c.cols, g.x = x, g.power_of_two = c.power_of_two;
    g.of_columns = c.folds ? by_col.floats() : nullptr, g.of_rows = c.folds ? by_row.floats() : nullptr;
    Array row_values(Dtype::s8, c.rows * c.cols, offset);
    if (with_values) g.values = row_values, g.scales = scales.floats();
    g.transposed = column_values, g.column_scales = column_scales.floats(), g.workspace = workspace.workspace();
    c.expect(run(g, nullptr) == cudaSuccess, "gradient");
    if (with_values)
      check(c, scales, c.rows, c.cols, by_rows,
            [&](int64_t row, int64_t i) { return row_values.byte(row * c.cols + i); });
    check(c, column_scales, c.cols, c.rows, by_columns_folded,
          [&](int64_t col, int64_t i) { return column_values.byte(col * c.rows + i); });
  }
}

}  // namespace

int main() {
  for (const int64_t rows : {1, 16, 100, 1024, 1500})
    for (const int64_t cols : {1, 8, 40, 64, 100, 257}) {
      tier.begin_shape();
      for (const Dtype dtype : {kF32, Dtype::bf16, Dtype::f16})
        for (const bool folds : {true, false})
          for (const bool power_of_two : {true, false})
            for (const int64_t offset : {0, 1})
              if (tier.takes()) test({dtype, rows, cols, folds, power_of_two}, offset);
    }
  for (const int64_t rows : {20000, 40000, 60000}) test({Dtype::bf16, rows, 40, true, false}, 0);
  test({kF32, 30000, 41, false, true}, 0);
  // What a block holds of a row, and of columns' magnitudes; and more.
  for (const int64_t cols : {20000, 40000, 80000}) test({Dtype::bf16, 3, cols, true, false}, 0);
  test({kF32, 5, 20001, true, false}, 0);
  std::printf("%d failures\n", failures);
  return failures > 0;
}
