// Runs the CUDA kernels of the gradients of softmax and log-softmax on the host, and compares them with the formulas in
// float64, and what arrays give that are aligned to 16 bytes with what others do, bit for bit.
//
//   run_softmax_grad              every regime
//   run_softmax_grad ROWS COLS    one shape
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "array.h"
#include "ops/softmax/cuda.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

constexpr Dtype kF32 = Dtype::f32, kF16 = Dtype::f16, kBf16 = Dtype::bf16;
constexpr float kScale = 0.75f;
int failures = 0;

struct Case {
  bool log;
  Dtype dy, x, dx;  // x: y of softmax
  int64_t rows, cols;
  bool has_where = false, has_lengths = false, has_starts = false;

  int64_t elements() const { return rows * cols; }

  void expect(bool holds, const char* what) const {
    if (holds) return;
    ++failures;
    const auto name = [](Dtype dtype) { return dtype == kF32 ? "f32" : dtype == kF16 ? "f16" : "bf16"; };
    std::printf("%s: %s, dy %s, x %s, dx %s, %ld x %ld%s%s%s\n", what, log ? "log-softmax" : "softmax", name(dy),
                name(x), name(dx), rows, cols, has_where ? ", where" : "", has_lengths ? ", lengths" : "",
                has_starts ? ", starts" : "");
  }
};

// Row r goes with row r / 2 % rows of the lengths, with row r % rows of `where`, and with r % kStarts of the starts.
struct Masks {
  static constexpr int64_t kStarts = 11;

  int64_t rows;
  std::vector<int32_t> lengths, starts;
  std::vector<uint8_t> where;

  explicit Masks(const Case& c) : rows(std::min<int64_t>(3, c.rows)) {
    // None, all of them and more, and some.
    for (int64_t row = 0; row < rows; ++row)
      lengths.push_back(static_cast<int32_t>(row == 0 ? c.cols * 2 / 3 : row == 1 ? c.cols + 5 : -7));
    for (int64_t i = 0; i < 8; ++i) starts.push_back(static_cast<int32_t>(c.cols / 8 + i));
    for (const int64_t start : {c.cols * 2 / 3 - 1, int64_t{-3}, c.cols}) starts.push_back(static_cast<int32_t>(start));
    for (int64_t i = 0; i < rows * c.cols; ++i) where.push_back(static_cast<uint8_t>(i * 7919 % 5 > 1 ? i % 3 + 1 : 0));
    if (rows == 3) std::fill(where.begin() + c.cols, where.begin() + 2 * c.cols, 0);
  }

  Mask mask(const Case& c) const {
    Mask mask;
    if (c.has_where) mask.where = where.data(), mask.where_rows.inner = {rows, 1};
    if (c.has_lengths) mask.lengths = lengths.data(), mask.lengths_rows.inner = {rows, 2};
    if (c.has_starts) mask.starts = starts.data(), mask.starts_rows.inner = {kStarts, 1};
    return mask;
  }
  bool counts(const Case& c, int64_t row, int64_t col) const {
    if (c.has_where && !where[row % rows * c.cols + col]) return false;
    if (c.has_starts && col < starts[row % kStarts]) return false;
    return !c.has_lengths || col < lengths[row / 2 % rows];
  }
};

struct Operands {
  Array dy, x;
  std::vector<float> log_sum, top;

  Operands(const Case& c, const Masks& masks)
      : dy(Array::normal(c.dy, c.elements(), 0)), x(Array::normal(c.x, c.elements(), 0)) {
    for (int64_t row = 0; row < c.rows; ++row) {
      double sum = 0, largest = -INFINITY;
      const auto at = [&](int64_t col) { return row * c.cols + col; };
      const auto power = [&](int64_t col) {
        return masks.counts(c, row, col) ? std::exp((double{x[at(col)]} - largest) * kScale) : 0;
      };
      for (int64_t col = 0; col < c.cols; ++col)
        if (masks.counts(c, row, col)) largest = std::max(largest, double{x[at(col)]});
      for (int64_t col = 0; col < c.cols; ++col) sum += power(col);
      log_sum.push_back(static_cast<float>(std::log(sum)));
      top.push_back(static_cast<float>(largest) * Scale(kScale).power);
      if (!c.log)
        for (int64_t col = 0; col < c.cols; ++col) x.set(at(col), sum > 0 ? static_cast<float>(power(col) / sum) : 0);
      // What does not count is not looked at.
      for (int64_t col = 0; col < c.cols; ++col)
        if (!masks.counts(c, row, col)) dy.set(at(col), NAN), x.set(at(col), NAN);
    }
  }
};

struct Exact {
  std::vector<double> dx;
  double size = 0;  // of the terms of which dx is the difference, squared and summed up
};

Exact exact(const Case& c, const Operands& o, const Masks& masks) {
  Exact exact{std::vector<double>(c.elements())};
  for (int64_t row = 0; row < c.rows; ++row) {
    double sum = 0;
    for (int64_t col = 0; col < c.cols; ++col) {
      const int64_t i = row * c.cols + col;
      if (masks.counts(c, row, col)) sum += c.log ? double{o.dy[i]} : double{o.dy[i]} * o.x[i];
    }
    for (int64_t col = 0; col < c.cols; ++col) {
      const int64_t i = row * c.cols + col;
      if (!masks.counts(c, row, col)) continue;
      const double factor = kScale * (c.log ? 1 : double{o.x[i]});
      const double first = o.dy[i] * factor;
      const double difference = (double{o.x[i]} * Scale(kScale).power - o.top[row]) * Scale(kScale).unit;
      const double second = sum * (c.log ? kScale * std::exp(difference - o.log_sum[row]) : factor);
      exact.dx[i] = c.log ? first - second : factor * (o.dy[i] - sum);
      exact.size += first * first + second * second;
    }
  }
  return exact;
}

cudaError_t run_rows(const Case& c, int64_t rows, Input dy, Input x, const float* log_sum, const float* top,
                     const Mask& mask, Output dx) {
  if (c.log) return run(LogSoftmaxBackward{rows, c.cols, dy, x, mask, log_sum, top, dx, kScale}, nullptr);
  return run(SoftmaxBackward{rows, c.cols, dy, x, mask, dx, kScale}, nullptr);
}

Array moved(const Array& array, Dtype dtype, int64_t elements) {
  Array other(dtype, elements, 1);
  for (int64_t i = 0; i < elements; ++i) other.set(i, array[i]);
  return other;
}

Input from_row(const Array& array, int64_t row, int64_t cols) {
  const Input whole = array;
  return {static_cast<const char*>(whole.data) + row * cols * size_of(whole.dtype), whole.dtype};
}

void test(const Case& c) {
  const Masks masks(c);
  const Operands o(c, masks);
  Array dx(c.dx, c.elements());
  c.expect(run_rows(c, c.rows, o.dy, o.x, o.log_sum.data(), o.top.data(), masks.mask(c), dx) == cudaSuccess, "error");
  const double bound = c.dx == kF32 ? 1e-6 : c.dx == kF16 ? 3e-4 : 2e-3, smallest = c.dx == kF16 ? 0x1p-25 : 0;
  const Exact expected = exact(c, o, masks);
  double error = 0;
  for (int64_t i = 0; i < c.elements(); ++i) {
    if (!masks.counts(c, i / c.cols, i % c.cols)) c.expect(dx[i] == 0, "an element that does not count");
    error += std::pow(std::max(std::abs(dx[i] - expected.dx[i]) - smallest, 0.0), 2);
  }
  c.expect(error <= bound * bound * expected.size, "dx");

  // The same bits elsewhere in memory, and of a row by itself.
  const Array dy_moved = moved(o.dy, c.dy, c.elements()), x_moved = moved(o.x, c.x, c.elements());
  Array dx_moved(c.dx, c.elements(), 1);
  run_rows(c, c.rows, dy_moved, x_moved, o.log_sum.data(), o.top.data(), masks.mask(c), dx_moved);
  c.expect(dx_moved == dx, "dx elsewhere");
  if (c.has_where || c.has_lengths) return;
  const int64_t row = c.rows / 2;
  Array alone(c.dx, c.cols);
  run_rows(c, 1, from_row(o.dy, row, c.cols), from_row(o.x, row, c.cols), &o.log_sum[row], &o.top[row], {}, alone);
  for (int64_t col = 0; col < c.cols; ++col)
    if (alone[col] != dx[row * c.cols + col]) return c.expect(false, "dx of a row alone");
}

void test_types(int64_t rows, int64_t cols) {
  tier.begin_shape();
  for (const bool log : {false, true}) {
    for (const Dtype dtype : {kF32, kBf16}) {
      if (!tier.takes()) continue;
      const Case plain{log, dtype, dtype, dtype, rows, cols};
      test(plain);
      for (const int mask : {1, 2, 3})
        if (log || mask == 2) test({log, dtype, dtype, dtype, rows, cols, mask % 2 == 1, mask > 1});
      for (const bool has_where : {false, true}) test({log, dtype, dtype, dtype, rows, cols, has_where, true, true});
    }
    if (!tier.takes()) continue;
    for (const bool wide : {false, true}) {
      const Dtype half = wide ? kBf16 : kF16, one = wide ? kF32 : half, other = wide ? half : kF32;
      const Case mixed{log, one, log ? other : one, other, rows, cols};
      test(mixed);
      for (const bool has_starts : {false, true})
        test({log, mixed.dy, mixed.x, mixed.dx, rows, cols, log, true, has_starts});
    }
  }
}

// Of three rows the second has the value: the others do not see it, and it makes the row what it makes of the formula.
void test_special_values(bool log, Dtype dtype, int64_t cols) {
  const Case c{log, dtype, dtype, dtype, 3, cols};
  const Masks masks(c);
  for (const float value : {INFINITY, -INFINITY, NAN})
    for (const bool in_dy : {false, true}) {
      Operands o(c, masks);
      Array before(dtype, c.elements()), after(dtype, c.elements());
      run_rows(c, c.rows, o.dy, o.x, o.log_sum.data(), o.top.data(), {}, before);
      (in_dy ? o.dy : o.x).set(cols + cols / 2, value);
      run_rows(c, c.rows, o.dy, o.x, o.log_sum.data(), o.top.data(), {}, after);
      const std::vector<double> expected = exact(c, o, masks).dx;
      for (int64_t i = 0; i < c.elements(); ++i) {
        const bool is_right = i / cols != 1             ? after[i] == before[i]
                              : std::isnan(expected[i]) ? std::isnan(after[i])
                              : std::isinf(expected[i]) ? after[i] == static_cast<float>(expected[i])
                                                        : std::abs(after[i] - expected[i]) < 0.1;
        if (!is_right) return c.expect(false, "a special value");
      }
    }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) {
    test_types(std::atoll(argv[1]), std::atoll(argv[2]));
  } else {
    for (const int64_t cols : {1,    7,    8,    64,   100,    128,    256,    257,    512,    1000,   1024,  2048,
                               2049, 4096, 5000, 8192, 12'288, 12'289, 16'384, 16'385, 20'000, 32'768, 40'001})
      test_types(cols < 600 ? 37 : 5, cols);
    for (const int64_t cols : {65'536, 140'001, 262'144, 300'000}) test_types(2, cols);
    for (const int64_t cols : {600'000, 1'100'001}) test_types(1, cols);
    test_types(300, 24);
    test_types(20, 20'000);
    for (const bool log : {false, true})
      for (const Dtype dtype : {kF32, kBf16})
        for (const int64_t cols : {1, 64, 257, 4096, 40'000, 600'000}) test_special_values(log, dtype, cols);
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
