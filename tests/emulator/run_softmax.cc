// Runs the CUDA kernels of softmax and log-softmax on the host and compares results with the formulas in float64, and
// what arrays give that are aligned to 16 bytes with what others do, bit for bit.
//
//   run_softmax              every regime
//   run_softmax ROWS COLS    one shape
#include <initializer_list>

#include "logits.h"
#include "ops/softmax/cuda.h"

namespace {

using namespace jaxnorm;

constexpr Dtype kF32 = Dtype::f32, kBf16 = Dtype::bf16;
int failures = 0;

struct Case {
  Dtype x, y;
  bool log;
  Masks masks;
  float scale;
  int64_t rows, cols;

  int64_t elements() const { return rows * cols; }

  void expect(bool holds, const std::string& what) const {
    if (holds) return;
    ++failures;
    std::printf("%s: %s, %s to %s, %s, scale %g, %ld x %ld\n", what.c_str(), log ? "log" : "softmax", name_of(x),
                name_of(y), name_of(masks), scale, rows, cols);
  }
};

struct Results {
  Array y, log_sum, top, tickets;

  // `offset`: of each array, in elements, so that it is aligned to them and to nothing more.
  Results(const Case& c, const Array& from, const TestMask& mask, int64_t offset)
      : y(c.y, c.elements(), offset), log_sum(kF32, c.rows), top(kF32, c.rows), tickets(kF32, 1) {
    Array x(c.x, c.elements(), offset);
    for (int64_t i = 0; i < c.elements(); ++i) x.set(i, from[i]);
    SoftmaxForward p{};
    p.rows = c.rows, p.cols = c.cols, p.scale = c.scale, p.log = c.log;
    p.x = x, p.y = y, p.mask = mask;
    if (c.log) p.log_sum = log_sum.floats(), p.top = top.floats();
    if (c.rows > 3) p.workspace = {tickets.floats(), 1};  // or there are as many clusters as have room for all rows
    c.expect(cuda::run(p, nullptr) == cudaSuccess, "call");
    if (!c.log) return;
    // As programs of before want it.
    Array before(c.y, c.elements(), offset), logsumexp(kF32, c.rows);
    p.y = before, p.log_sum = logsumexp.floats(), p.top = nullptr;
    c.expect(cuda::run(p, nullptr) == cudaSuccess && before == y, "call without a top");
    for (int64_t row = 0; row < c.rows; ++row) {
      const double expected = logsumexp_of(log_sum[row], top[row], Scale(c.scale).unit);
      c.expect(is_near(logsumexp[row], expected, 2e-7 * std::fmax(1, std::fabs(expected))), "logsumexp");
    }
  }

  bool operator==(const Results& r) const { return y == r.y && log_sum == r.log_sum && top == r.top; }
};

// `distance`: of the logit from the largest, of which f32 loses a share on the way.
double tolerance(const Case& c, double exact, double distance) {
  if (c.log) return 6e-7 * std::fmax(1, std::fabs(exact));
  return exact * (4e-7 + 1.2e-7 * std::fabs(distance)) + 1e-37;
}

void compare(const Case& c, const Array& x, const TestMask& mask, const Results& results) {
  const LogitsOf z(c.scale, 0);
  int64_t wrong = 0, off = 0;
  for (int64_t row = 0; row < c.rows; ++row) {
    std::vector<double> counted;
    for (int64_t col = 0; col < c.cols; ++col)
      if (mask.counts(row, col)) counted.push_back(z(x[row * c.cols + col]));
    const RowSums sums(counted);
    if (c.log) {
      const double found = logsumexp_of(results.log_sum[row], results.top[row], Scale(c.scale).unit);
      wrong += !is_near(found, sums.logsumexp(), 4e-7 * std::fmax(1, std::fabs(sums.logsumexp())));
      if (std::isfinite(sums.logsumexp())) wrong += !is_near(results.log_sum[row], std::log(sums.sum), 2e-6);
    }
    for (int64_t col = 0; col < c.cols; ++col) {
      const double distance = z(x[row * c.cols + col]) - sums.max, found = results.y[row * c.cols + col];
      double exact = c.log ? -INFINITY : 0;
      if (mask.counts(row, col)) exact = c.log ? distance - std::log(sums.sum) : std::exp(distance) / sums.sum;
      if (c.y == kBf16 && exact < -0x1.ffp127) exact = -INFINITY;
      double allowed = tolerance(c, exact, distance);
      if (c.y != kF32 && std::isfinite(exact) && exact != 0) {
        const double ulp = std::ldexp(1.0, std::ilogb(exact) - 7);
        off += !(std::fabs(found - exact) <= 0.5 * ulp + allowed);
        allowed = std::fmax(ulp, allowed);
      }
      wrong += !is_near(found, exact, allowed);
    }
  }
  c.expect(wrong == 0, "results, " + std::to_string(wrong));
  c.expect(off * 200 <= c.elements(), "rounding");
}

void test(const Case& c) {
  Array x = Array::normal(c.x, c.elements(), 0);
  for (int64_t i = 0; i < c.elements(); ++i) x.set(i, 3 * x[i] + static_cast<float>(i / c.cols % 3 * 40));
  const TestMask mask(c.masks, c.cols, 0);
  const Results results(c, x, mask, 0);
  compare(c, x, mask, results);
  if (c.rows > 5 && c.cols > 5120 && c.cols < 200000) return;
  c.expect(Results(c, x, mask, 1) == results, "unaligned arrays");
}

// What overflows somewhere on the way, each in rows of its own.
void test_extremes(Case c) {
  const auto set_row = [&](Array& x, int64_t row, float value) {
    for (int64_t i = 0; i < c.cols; ++i) x.set(row * c.cols + i, value);
  };
  const float lowest = c.x == kF32 ? -3.4e38f : -3.3e38f;
  const float everywhere[] = {-INFINITY, lowest, -1e30f, 1e30f, -1e9f, 12345, -lowest, 0},
              somewhere[] = {INFINITY, NAN, -INFINITY, -lowest, lowest, 1e9f};
  c.rows = std::size(everywhere) * 3 + std::size(somewhere) + 2;
  Array x = Array::normal(c.x, c.elements(), 0);
  int64_t row = 0;
  for (const float value : everywhere) {
    set_row(x, row++, value);
    for (int64_t i = c.cols / 2; i < c.cols; ++i) x.set(row * c.cols + i, value);
    ++row;
    for (int64_t i = 0; i < c.cols / 2; ++i) x.set(row * c.cols + i, value);
    ++row;
  }
  for (const float value : somewhere) x.set(row * c.cols + c.cols / 2, value), ++row;
  for (int64_t i = 0; i < c.cols; ++i) x.set(row * c.cols + i, 1e4f + i % 7 * (c.x == kF32 ? 0.25f : 64.0f));
  const TestMask mask(c.masks, c.cols, 0);
  const Results results(c, x, mask, 0);
  compare(c, x, mask, results);
  c.expect(Results(c, x, mask, 1) == results, "unaligned extremes");
}

// Of rows one of whose logits is far above the others the logarithm of the sum has all its digits.
void test_small_logarithms(int64_t cols) {
  for (const Dtype dtype : {kF32, kBf16}) {
    const Case c{dtype, dtype, true, Masks::none, 1, 6, cols};
    Array x(dtype, c.elements(), 0);
    for (int64_t i = 0; i < c.elements(); ++i)
      x.set(i, i % cols == cols / 3 ? static_cast<float>(i / cols * 15 + 8) : 0);
    const Results results(c, x, TestMask(c.masks, cols, 0), 0);
    for (int64_t row = 0; row < c.rows; ++row) {
      const double exact = std::log1p(static_cast<double>(cols - 1) * std::exp(-(row * 15.0 + 8)));
      c.expect(is_near(results.log_sum[row], exact, 1e-5 * exact), "a small logarithm");
      c.expect(is_near(results.y[row * cols + cols / 3], -exact, (dtype == kF32 ? 1e-5 : 4e-3) * exact), "y near 0");
    }
  }
}

template <typename F>
void for_each_way(F f) {
  for (const Masks masks :
       {Masks::none, Masks::where, Masks::lengths, Masks::both, Masks::window, Masks::window_and_where})
    for (const bool log : {false, true}) {
      f(kF32, kF32, log, masks);
      f(kBf16, kBf16, log, masks);
      f(log ? kF32 : kBf16, log ? kBf16 : kF32, log, masks);
    }
}

void test_all(int64_t rows, int64_t cols) {
  tier.begin_shape();
  for_each_way([&](Dtype x, Dtype y, bool log, Masks masks) {
    if (tier.takes()) test({x, y, log, masks, rows % 2 ? 1.0f : 0.7f, rows, cols});
  });
}

// Whether each row with a window has a plan: of a block in whole warps that has room for it, or streams it.
void test_window_plans() {
  for (const Dtype x : {kF32, kBf16})
    for (int64_t cols = 1; cols < 1 << 21; cols += 1 + cols / 64) {
      const cuda::Plan plan = cuda::make_window_plan(x, cols);
      const bool streams = plan.vectors == cuda::kStreamed && plan.threads_per_row == 256;
      const int64_t room = int64_t{plan.vectors} * plan.threads_per_row * (x == kF32 ? 4 : 8);
      const bool fits = plan.threads_per_row % 32 == 0 && plan.threads_per_row <= cuda::kMaxThreads && cols <= room;
      const bool is_block = plan.blocks_per_row == 1 && plan.rows_per_block == 1;
      Case{x, x, false, Masks::window, 1, 0, cols}.expect(is_block && (streams ? plan.entry == 1 : fits), "plan");
    }
}

// Where rows begin and end, each with each.
void test_windows(int64_t rows, int64_t cols) {
  tier.begin_shape();
  for_each_way([&](Dtype x, Dtype y, bool log, Masks masks) {
    if (masks >= Masks::window && tier.takes()) test({x, y, log, masks, 0.7f, rows, cols});
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) {
    test_all(std::atoll(argv[1]), std::atoll(argv[2]));
  } else {
    for (const int64_t cols : {1, 3, 64, 100, 128, 256, 1000, 1024})
      for (const int64_t rows : {1, 3, 43}) test_all(rows, cols);
    for (const int64_t cols : {2048, 4096, 5120, 12288, 16384, 20000, 40000}) test_all(9, cols);
    test_window_plans();
    for (const int64_t cols : {1, 7, 8, 257, 1024, 3000, 20000}) test_windows(cols < 3000 ? 7 * 18 : 18, cols);
    test_windows(2, 300000);
    for (const int64_t cols : {160000, 300000}) test({kF32, kF32, true, Masks::none, 1, 2, cols});
    for (const int64_t cols : {1, 5, 64, 1000, 4096, 20000, 40000, 300000}) test_small_logarithms(cols);
    // Rows whose exponentials are held, in one way but not in the other.
    for (const float scale : {1.0f, -0.7f})
      for (const int64_t cols : {16384, 17000, 33000, 40008})
        for (const Dtype dtype : {kF32, kBf16}) test({dtype, dtype, cols == 33000, Masks::none, scale, 5, cols});
    test({kBf16, kBf16, false, Masks::where, 1, 8, 300000});
    test({kBf16, kBf16, false, Masks::none, 1, 2, 300000});
    test({kF32, kF32, false, Masks::none, 1, 1, 1 << 20});
    test({kBf16, kF32, true, Masks::lengths, 1, 2, 1 << 20});
    for_each_way([](Dtype x, Dtype y, bool log, Masks masks) {
      for (const int64_t cols : {64, 100, 256, 4096})
        for (const float scale : {1.0f, -0.5f}) test_extremes({x, y, log, masks, scale, 0, cols});
    });
    test_extremes({kF32, kF32, true, Masks::none, 1, 0, 40000});
    test_extremes({kF32, kF32, false, Masks::none, -0.5f, 0, 20000});
    test_extremes({kBf16, kBf16, false, Masks::none, 1, 0, 16384});
    test_extremes({kF32, kF32, false, Masks::both, 1, 0, 300000});
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
