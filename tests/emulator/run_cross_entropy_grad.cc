// Runs the CUDA kernels of the gradient of cross-entropy on the host, and compares them with the formula in float64,
// and what arrays give that are aligned to 16 bytes with what others do, bit for bit.
//
//   run_cross_entropy_grad              every shape
//   run_cross_entropy_grad ROWS COLS    one shape
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "array.h"
#include "ops/cross_entropy/cuda.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

constexpr Dtype kF32 = Dtype::f32, kF16 = Dtype::f16, kBf16 = Dtype::bf16;
constexpr float kScale = 1.5f;
int failures = 0;

struct Case {
  Dtype dtype;
  int64_t rows, cols;
  float soft_cap;
  bool has_where, has_label_logit, has_total;

  int64_t elements() const { return rows * cols; }

  void expect(bool holds, const char* what) const {
    if (holds) return;
    ++failures;
    std::printf("%s: %s, %ld x %ld, soft cap %g%s%s%s\n", what,
                dtype == kF32   ? "f32"
                : dtype == kF16 ? "f16"
                                : "bf16",
                rows, cols, soft_cap, has_where ? ", where" : "", has_label_logit ? ", dlabel_logit" : "",
                has_total ? ", dtotal" : "");
  }
};

struct Operands {
  Array x, log_sum, dlog_sum, dlabel_logit, dtotal, top;
  std::vector<int32_t> labels;
  std::vector<uint8_t> where;  // of two rows

  explicit Operands(const Case& c)
      : x(Array::normal(c.dtype, c.elements(), 0)),
        log_sum(kF32, c.rows),
        dlog_sum(Array::normal(kF32, c.rows, 0)),
        dlabel_logit(Array::normal(kF32, c.rows, 0)),
        dtotal(Array::normal(kF32, c.rows, 0)),
        top(kF32, c.rows) {
    for (int64_t i = 0; i < 2 * c.cols; ++i) where.push_back(static_cast<uint8_t>(i * 7919 % 5 > 1 ? i % 3 + 1 : 0));
    if (c.cols == 1) where[0] = 1, where[1] = 0;
    for (int64_t i = 0; i < c.elements(); ++i) x.set(i, 4 * x[i]);
    for (int64_t row = 0; row < c.rows; ++row) {
      // The first, the last, one in between, and three that name no column, one of which leaves its row out.
      const int64_t label[] = {0, c.cols - 1, c.cols / 3, -1, c.cols, row % 4 == 1 ? INT32_MAX : kIgnored};
      labels.push_back(static_cast<int32_t>(label[row % 6]));
      dtotal.set(row, dtotal[row] / c.cols);
      double sum = 0, largest = -INFINITY;
      for (int64_t col = 0; col < c.cols; ++col)
        if (counts(c, row, col)) largest = std::max(largest, z(c, row, col));
      top.set(row, static_cast<float>(largest / unit(c)));
      for (int64_t col = 0; col < c.cols; ++col)
        if (counts(c, row, col)) sum += std::exp(difference(c, row, col));
      log_sum.set(row, static_cast<float>(std::log(sum)));
    }
  }

  bool counts(const Case& c, int64_t row, int64_t col) const { return !c.has_where || where[row % 2 * c.cols + col]; }

  double z(const Case& c, int64_t row, int64_t col) const {
    const double plain = double{x[row * c.cols + col]} * kScale;
    return c.soft_cap ? c.soft_cap * std::tanh(plain / c.soft_cap) : plain;
  }

  static float unit(const Case& c) { return c.soft_cap == 0 ? Scale(kScale).unit : 1; }

  double difference(const Case& c, int64_t row, int64_t col) const {
    return z(c, row, col) - (top[row] == -INFINITY ? 0 : double{top[row]} * unit(c));
  }

  // And the magnitudes of the terms of which each is the sum.
  struct Exact {
    std::vector<double> dx, terms;
  };

  Exact exact(const Case& c) const {
    std::vector<double> dx(c.elements()), terms(c.elements());
    for (int64_t row = 0; row < c.rows; ++row)
      for (int64_t col = 0; col < c.cols; ++col) {
        const bool is_label = col == labels[row];
        const double of_label = c.has_label_logit && is_label ? dlabel_logit[row] : 0;
        const double share = std::exp(difference(c, row, col) - log_sum[row]);
        const double of_sum = counts(c, row, col) ? dlog_sum[row] * share : 0;
        const double of_total = counts(c, row, col) && c.has_total ? dtotal[row] : 0;
        const double capped = c.soft_cap ? z(c, row, col) / c.soft_cap : 0, slope = kScale * (1 - capped * capped);
        const int64_t i = row * c.cols + col;
        if (labels[row] == kIgnored) continue;
        if (counts(c, row, col) || is_label) dx[i] = slope * (of_label + of_sum + of_total);
        terms[i] = slope * (std::abs(of_label) + std::abs(of_sum) + std::abs(of_total));
      }
    return {dx, terms};
  }

  cudaError_t run(const Case& c, Input from, int64_t first, int64_t rows, Output dx) {
    CrossEntropyBackward p{};
    p.rows = rows, p.cols = c.cols, p.x = from, p.labels = labels.data() + first, p.scale = kScale;
    p.soft_cap = c.soft_cap, p.dx = dx, p.log_sum = log_sum.floats() + first;
    p.dlog_sum = dlog_sum.floats() + first, p.top = top.floats() + first;
    if (c.has_label_logit) p.dlabel_logit = dlabel_logit.floats() + first;
    if (c.has_total) p.dtotal = dtotal.floats() + first;
    if (c.has_where) p.mask.where = where.data(), p.mask.where_rows.inner = {2, 1};
    return cuda::run(p, nullptr);
  }
};

Array copy_of(const Array& array, const Case& c, int64_t offset) {
  Array copy(c.dtype, c.elements(), offset);
  for (int64_t i = 0; i < c.elements(); ++i) copy.set(i, array[i]);
  return copy;
}

// Whether the bytes before and after an array are what they were.
bool is_untouched_beside(const Array& array, const Case& c, int64_t offset) {
  const int64_t size = size_of(c.dtype), end = c.elements() * size;
  for (int64_t i = -offset * size; i < 0; ++i)
    if (array.byte(i) != 0xff) return false;
  for (int64_t i = end; i < end + 32; ++i)
    if (array.byte(i) != 0xff) return false;
  return true;
}

void test(const Case& c) {
  Operands o(c);
  Array dx(c.dtype, c.elements());
  c.expect(o.run(c, o.x, 0, c.rows, dx) == cudaSuccess, "error");
  const auto [exact, terms] = o.exact(c);
  const double rounding = c.dtype == kF32 ? 0 : c.dtype == kF16 ? 0x1p-11 : 0x1p-8, smallest = 0x1p-25;
  double error = 0, size = 0;
  for (int64_t i = 0; i < c.elements(); ++i) {
    const double difference = std::abs(dx[i] - exact[i]);
    error += difference * difference;
    size += terms[i] * terms[i];
    if (exact[i] == 0 && dx[i] != 0) return c.expect(false, "a column that does not count");
    if (difference > rounding * std::abs(exact[i]) + 1e-5 * terms[i] + (c.dtype == kF16 ? smallest : 0))
      return c.expect(false, "an element of dx");
  }
  if (c.dtype == kF32) c.expect(error <= 1e-12 * size, "dx");

  // In x's place, elsewhere in memory, there in x's place too, x and dx in different places of a word, and a row by
  // itself.
  const int64_t own = 1 + c.cols % 7;
  for (const int64_t offset : {int64_t{0}, own}) {
    Array x = copy_of(o.x, c, offset), elsewhere(c.dtype, c.elements(), offset);
    Array apart(c.dtype, c.elements(), offset + 1);
    o.run(c, x, 0, c.rows, elsewhere);
    c.expect(elsewhere == dx, "dx elsewhere");
    c.expect(is_untouched_beside(elsewhere, c, offset), "what lies beside dx");
    o.run(c, x, 0, c.rows, apart);
    c.expect(apart == dx, "dx in another place of a word");
    c.expect(is_untouched_beside(apart, c, offset + 1), "what lies beside dx in another place of a word");
    o.run(c, x, 0, c.rows, x);
    c.expect(x == dx, "dx in x's place");
    c.expect(is_untouched_beside(x, c, offset), "what lies beside dx in x's place");
  }
  const int64_t row = c.rows / 4 * 2;  // of the same mask as the first
  const Input whole = o.x;
  Array alone(c.dtype, c.cols);
  o.run(c, {static_cast<const char*>(whole.data) + row * c.cols * size_of(c.dtype), c.dtype}, row, 1, alone);
  for (int64_t col = 0; col < c.cols; ++col)
    if (alone[col] != dx[row * c.cols + col]) return c.expect(false, "dx of a row alone");
}

// Large logits, of either sign, and what is no number or infinite: as in the formula. A logit far above its logsumexp,
// which is the other logits', has the rounding of an exponent of up to 50 in its exponential.
void test_extremes(Dtype dtype, float soft_cap) {
  const float largest = dtype == kF16 ? 60000.0f : 1e30f;
  const float values[] = {largest, -largest, 300, -300, 0.0f, -0.0f, 1e-6f, INFINITY, -INFINITY, NAN};
  const Case c{dtype, 2, 16, soft_cap, false, true, true};
  for (const float value : values) {
    Operands o(c);
    o.x.set(5, value);
    Array dx(dtype, c.elements());
    o.run(c, o.x, 0, c.rows, dx);
    const std::vector<double> exact = o.exact(c).dx;
    for (int64_t i = 0; i < c.elements(); ++i) {
      const float expected = static_cast<float>(exact[i]);
      const bool is_right =
          std::isnan(expected) ? std::isnan(dx[i])
          : std::isinf(expected) || std::abs(expected) > (dtype == kF16 ? 65519.0f : 3e38f)
              ? dx[i] == std::copysign(INFINITY, expected)
              : std::abs(dx[i] - expected) <= (dtype == kF32 ? 1e-5 : 8e-3) * (1 + std::abs(expected));
      if (!is_right) return c.expect(false, "an extreme value");
    }
  }
}

// Where no column counts log_sum and top are -inf, and dx is that of the label's logit, or 0 if that has none.
void test_nothing_counts(Dtype dtype) {
  const Case c{dtype, 2, 40, 0, true, true, true};
  Operands o(c);
  std::fill(o.where.begin(), o.where.end(), 0);
  Array dx(dtype, c.elements());
  for (int row = 0; row < 2; ++row) o.log_sum.set(row, -INFINITY), o.top.set(row, -INFINITY);
  o.dlabel_logit.set(1, 0);
  o.x.set(c.cols + o.labels[1], NAN);
  o.run(c, o.x, 0, c.rows, dx);
  for (int64_t i = 0; i < c.elements(); ++i) {
    const double expected = i == o.labels[0] ? kScale * o.dlabel_logit[0] : 0;
    if (!(std::abs(dx[i] - expected) <= 1e-2 * std::abs(expected)))
      return c.expect(false, "a row of which nothing counts");
  }
}

void test_all(int64_t rows, int64_t cols) {
  tier.begin_shape();
  for (const Dtype dtype : {kF32, kBf16, kF16})
    for (const float soft_cap : {0.0f, 5.0f})
      for (const bool has_where : {false, true})
        for (const bool plain : {false, true})
          if (tier.takes()) test({dtype, rows, cols, soft_cap, has_where, !plain, !plain});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) {
    test_all(std::atoll(argv[1]), std::atoll(argv[2]));
  } else {
    for (const int64_t cols : {1, 2, 7, 8, 9, 17, 24, 100, 256, 257, 515, 1000, 1031, 2048, 2050, 4104, 10'000})
      for (const int64_t rows : {1, 37})
        if (rows * cols < 200'000) test_all(rows, cols);
    for (const int64_t cols : {32'000, 50'257, 128'256, 262'144, 1'100'001}) test_all(2, cols);
    test_all(5000, 3);
    test_all(2100, 40);
    for (const Dtype dtype : {kF32, kBf16, kF16}) {
      for (const float soft_cap : {0.0f, 5.0f, 50.0f}) test_extremes(dtype, soft_cap);
      test_nothing_counts(dtype);
    }
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
