// Runs the CUDA kernels of cross-entropy on the host and compares results with the formulas in float64, and what arrays
// give that are aligned to 16 bytes with what others do, bit for bit.
//
//   run_cross_entropy              every regime
//   run_cross_entropy ROWS COLS    one shape
#include <initializer_list>

#include "cuda/engine/plan.h"
#include "logits.h"
#include "ops/cross_entropy/cuda.h"

namespace {

using namespace jaxnorm;

constexpr Dtype kF32 = Dtype::f32, kBf16 = Dtype::bf16;
int failures = 0;

struct Case {
  Dtype x;
  Masks masks;
  float scale, soft_cap;
  bool with_total;
  int64_t rows, cols;

  int64_t elements() const { return rows * cols; }

  void expect(bool holds, const std::string& what) const {
    if (holds) return;
    ++failures;
    std::printf("%s: %s, %s, scale %g, soft cap %g, %ld x %ld\n", what.c_str(), name_of(x), name_of(masks), scale,
                soft_cap, rows, cols);
  }
};

// Whether every row has a plan: of a thread group that holds it, or streams it.
void test_plans() {
  for (const Dtype x : {kF32, kBf16})
    for (int64_t cols = 1; cols < 100'000; ++cols) {
      const cuda::Plan plan = cuda::make_one_block_plan(x, cols);
      const int64_t held = int64_t{plan.threads_per_row} * plan.vectors * cuda::vector_of(x);
      const bool holds = plan.vectors == cuda::kStreamed || held >= cols;
      Case{x, Masks::none, 1, 0, false, 0, cols}.expect(holds && plan.blocks_per_row == 1, "plan");
    }
}

// Labels, of which some name no column.
std::vector<int32_t> labels_of(const Case& c) {
  std::vector<int32_t> labels;
  for (int64_t row = 0; row < c.rows; ++row)
    labels.push_back(static_cast<int32_t>(row % 4 == 1   ? -1 - row
                                          : row % 4 == 2 ? c.cols + row / 4
                                                         : row * 7919 % c.cols));
  return labels;
}

struct Results {
  Array log_sum, label_logit, total, top;

  // `offset`: of each array, in elements, so that it is aligned to them and to nothing more.
  Results(const Case& c, const Array& from, const TestMask& mask, int64_t offset)
      : log_sum(kF32, c.rows), label_logit(kF32, c.rows), total(kF32, c.rows), top(kF32, c.rows) {
    Array x(c.x, c.elements(), offset);
    for (int64_t i = 0; i < c.elements(); ++i) x.set(i, from[i]);
    const std::vector<int32_t> labels = labels_of(c);
    CrossEntropyForward p{};
    p.rows = c.rows, p.cols = c.cols, p.scale = c.scale, p.soft_cap = c.soft_cap;
    p.x = x, p.labels = labels.data(), p.mask = mask;
    p.log_sum = log_sum.floats(), p.label_logit = label_logit.floats(), p.top = top.floats();
    if (c.with_total) p.total = total.floats();
    c.expect(cuda::run(p, nullptr) == cudaSuccess, "call");
  }

  bool operator==(const Results& r) const {
    return log_sum == r.log_sum && label_logit == r.label_logit && total == r.total && top == r.top;
  }
};

void compare(const Case& c, const Array& x, const TestMask& mask, const Results& results) {
  const LogitsOf z(c.scale, c.soft_cap);
  const std::vector<int32_t> labels = labels_of(c);
  for (int64_t row = 0; row < c.rows; ++row) {
    const auto at = [&](int64_t col) { return z(x[row * c.cols + col]); };
    const auto expect = [&](double found, double exact, double size, const char* what) {
      const bool is_close = is_near(found, exact, 4e-7 * size + 1e-37);
      c.expect(is_close, what + (" of row " + std::to_string(row)));
    };
    std::vector<double> counted;
    for (int64_t col = 0; col < c.cols; ++col)
      if (mask.counts(row, col)) counted.push_back(at(col));
    const RowSums sums(counted);
    // A large logit has less room for its last place.
    const double unit = c.soft_cap == 0 ? Scale(c.scale).unit : 1, logsumexp = sums.logsumexp();
    const double found = logsumexp_of(results.log_sum[row], results.top[row], unit);
    expect(found, logsumexp, 1.5 * std::fmax(1, std::fabs(logsumexp)), "logsumexp");
    if (std::isfinite(logsumexp)) expect(results.log_sum[row], std::log(sums.sum), 3 + c.soft_cap, "log_sum");
    const double origin = results.top[row] == -INFINITY ? 0 : results.top[row] * unit;
    const bool is_column = labels[row] >= 0 && labels[row] < c.cols;
    const double label = is_column ? static_cast<float>(at(labels[row]) - origin) : 0;
    expect(results.label_logit[row], label, std::fabs(label) + c.soft_cap, "label_logit");
    double total = 0, size = 0;
    for (const double value : counted) total += value - origin, size += std::fabs(value - origin) + c.soft_cap;
    if (c.with_total && sums.size < 3e37) expect(results.total[row], total, std::isfinite(size) ? size : 1, "total");
  }
}

void test(const Case& c) {
  Array x = Array::normal(c.x, c.elements(), 0);
  for (int64_t i = 0; i < c.elements(); ++i) x.set(i, 3 * x[i] + static_cast<float>(i / c.cols % 3 * 40));
  const TestMask mask(c.masks, c.cols, 0);
  const Results results(c, x, mask, 0);
  compare(c, x, mask, results);
  if (c.cols > 10000 && c.cols < 200000) return;
  c.expect(Results(c, x, mask, 1) == results, "unaligned arrays");
}

// What overflows somewhere on the way, each in rows of its own.
void test_extremes(Case c) {
  const float lowest = c.x == kF32 ? -3.4e38f : -3.3e38f;
  const float everywhere[] = {-INFINITY, lowest, -1e30f, 1e30f, 1e9f, -12345},
              somewhere[] = {INFINITY, NAN, -INFINITY, -lowest, lowest};
  c.rows = std::size(everywhere) * 2 + std::size(somewhere);
  Array x = Array::normal(c.x, c.elements(), 0);
  int64_t row = 0;
  for (const float value : everywhere) {
    for (int64_t i = 0; i < c.cols; ++i) x.set(row * c.cols + i, value);
    ++row;
    for (int64_t i = 0; i < c.cols / 2; ++i) x.set(row * c.cols + i, value);
    ++row;
  }
  for (const float value : somewhere) x.set(row++ * c.cols + c.cols / 2, value);
  const TestMask mask(c.masks, c.cols, 0);
  const Results results(c, x, mask, 0);
  compare(c, x, mask, results);
  c.expect(Results(c, x, mask, 1) == results, "unaligned extremes");
}

template <typename F>
void for_each_way(F f) {
  for (const Dtype x : {kF32, kBf16})
    for (const Masks masks : {Masks::none, Masks::where})
      for (const float soft_cap : {0.0f, 30.0f})
        for (const bool with_total : {false, true}) f(x, masks, soft_cap, with_total);
}

void test_all(int64_t rows, int64_t cols) {
  tier.begin_shape();
  for_each_way([&](Dtype x, Masks masks, float soft_cap, bool with_total) {
    if (tier.takes()) test({x, masks, rows % 2 ? 1.0f : -0.7f, soft_cap, with_total, rows, cols});
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) {
    test_all(std::atoll(argv[1]), std::atoll(argv[2]));
  } else {
    test_plans();
    for (const int64_t cols : {1, 3, 64, 100, 256, 1000, 1024})
      for (const int64_t rows : {1, 6, 43}) test_all(rows, cols);
    for (const int64_t cols : {2048, 4096, 8192, 9000, 16384, 32000, 50257}) test_all(9, cols);
    for (const Dtype x : {kF32, kBf16})
      for (const Masks masks : {Masks::none, Masks::where}) test({x, masks, 1, 0, true, 1, 1 << 20});
    for_each_way([](Dtype x, Masks masks, float soft_cap, bool with_total) {
      for (const int64_t cols : {64, 100, 4096, 20000})
        for (const float scale : {1.0f, -0.5f}) test_extremes({x, masks, scale, soft_cap, with_total, 0, cols});
    });
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
