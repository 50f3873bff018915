// Runs the CUDA kernels of gated norms on the host and compares results and gradients with the formulas in float64, and
// what arrays give that are aligned to 16 bytes with what others do, bit for bit.
//
//   run_gated              every regime
//   run_gated ROWS COLS    one shape
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "array.h"
#include "cuda/engine/plan.h"
#include "ops/norm/cuda.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

constexpr Dtype kF32 = Dtype::f32, kBf16 = Dtype::bf16;
constexpr double kEpsilon = 1e-6, kOffset = 0.5;
int failures = 0;

struct Case {
  Dtype dtype, weights;
  Activation activation;
  bool first, scaled;
  int64_t rows, cols, count;

  int64_t elements() const { return rows * cols; }

  void expect(bool holds, const char* what) const {
    if (holds) return;
    ++failures;
    std::printf("%s: %s, weights %s, %s, gate %s, %ld x %ld, %ld weight_rows\n", what, dtype == kF32 ? "f32" : "bf16",
                !scaled           ? "absent"
                : weights == kF32 ? "f32"
                                  : "bf16",
                activation == Activation::silu ? "silu" : "sigmoid", first ? "first" : "last", rows, cols, count);
  }
};

struct Operands {
  Array x, gate, dy, scale;

  explicit Operands(const Case& c)
      : x(Array::normal(c.dtype, c.elements(), 0)),
        gate(Array::normal(c.dtype, c.elements(), 0)),
        dy(Array::normal(c.dtype, c.elements(), 0)),
        scale(Array::normal(c.weights, c.count * c.cols, 0)) {
    for (int64_t i = 0; i < c.elements(); ++i) gate.set(i, 4 * gate[i]);
  }
};

struct Exact {
  std::vector<double> y, dx, dgate, dscale;

  Exact(const Case& c, const Operands& o)
      : y(c.elements()), dx(c.elements()), dgate(c.elements()), dscale(c.count * c.cols) {
    std::vector<double> a(c.cols), slope(c.cols), h_hat(c.cols), u(c.cols), g(c.cols);
    for (int64_t row = 0; row < c.rows; ++row) {
      const int64_t at = row * c.cols, head = row % c.count * c.cols;
      const auto factor = [&](int64_t i) { return c.scaled ? o.scale[head + i] + kOffset : 1; };
      double squares = 0, product = 0;
      for (int64_t i = 0; i < c.cols; ++i) {
        const double v = o.gate[at + i], s = 1 / (1 + std::exp(-v)), rest = 1 / (1 + std::exp(v));
        const bool silu = c.activation == Activation::silu;
        a[i] = silu ? v * s : s;
        slope[i] = silu ? s * (1 + v * rest) : s * rest;
        h_hat[i] = c.first ? o.x[at + i] * a[i] : o.x[at + i];
        squares += h_hat[i] * h_hat[i];
      }
      const double rstd = 1 / std::sqrt(squares / c.cols + kEpsilon);
      for (int64_t i = 0; i < c.cols; ++i) {
        h_hat[i] *= rstd;
        u[i] = c.first ? o.dy[at + i] : o.dy[at + i] * a[i];
        g[i] = u[i] * factor(i);
        product += g[i] * h_hat[i];
      }
      for (int64_t i = 0; i < c.cols; ++i) {
        y[at + i] = h_hat[i] * factor(i) * (c.first ? 1 : a[i]);
        const double dh = rstd * (g[i] - h_hat[i] * product / c.cols);
        dx[at + i] = c.first ? dh * a[i] : dh;
        dgate[at + i] = slope[i] * (c.first ? dh * o.x[at + i] : o.dy[at + i] * h_hat[i] * factor(i));
        dscale[head + i] += u[i] * h_hat[i];
      }
    }
  }
};

struct Results {
  Array y, rstd, dx, dgate, dscale;

  // `offset`: of each array, in elements, so that it is aligned to them and to nothing more.
  Results(const Case& c, const Operands& o, int64_t offset)
      : y(c.dtype, c.elements(), offset),
        rstd(kF32, c.rows),
        dx(c.dtype, c.elements(), offset),
        dgate(c.dtype, c.elements(), offset),
        dscale(kF32, c.count * c.cols) {
    const auto moved = [&](const Array& array, Dtype dtype, int64_t elements) {
      Array copy(dtype, elements, offset);
      for (int64_t i = 0; i < elements; ++i) copy.set(i, array[i]);
      return copy;
    };
    const auto x = moved(o.x, c.dtype, c.elements()), gate = moved(o.gate, c.dtype, c.elements());
    const auto dy = moved(o.dy, c.dtype, c.elements()), scale = moved(o.scale, c.weights, c.count * c.cols);
    GatedNormForward f{};
    f.rows = c.rows, f.cols = c.cols;
    f.epsilon = kEpsilon, f.scale_offset = kOffset;
    f.x = x, f.y = y, f.rstd = rstd.floats(), f.gate = {gate, c.activation, c.first}, f.weight_rows = {c.count, 1};
    if (c.scaled) f.scale = scale;
    c.expect(run(f, nullptr) == cudaSuccess, "forward");

    const WorkspaceSize size = gated_norm_grad_workspace({c.dtype, c.cols, 1, {c.count, 1}, true});
    Array workspace(kF32, size.floats);
    GatedNormBackward b{};
    b.rows = c.rows, b.cols = c.cols, b.scale_offset = kOffset, b.weight_rows = f.weight_rows;
    b.x = x, b.dy = dy, b.scale = f.scale, b.gate = f.gate, b.rstd = f.rstd, b.workspace = workspace.workspace();
    b.dx = dx, b.dgate = dgate, b.dscale = dscale;
    c.expect(run(b, nullptr) == cudaSuccess, "backward");

    Array alone(c.dtype, c.elements(), offset);
    b.dscale = {}, b.dgate = {}, b.dx = alone;
    c.expect(run(b, nullptr) == cudaSuccess && alone == dx, "dx alone");
    b.dx = {}, b.dgate = alone;
    c.expect(run(b, nullptr) == cudaSuccess && alone == dgate, "dgate alone");
  }

  // Whether rows have the same results. Sums over rows are of another order where those of few rows are aligned.
  bool operator==(const Results& r) const { return y == r.y && rstd == r.rstd && dx == r.dx && dgate == r.dgate; }
};

// Whether f32 results are within 5e-7 of the exact ones, each by itself, and of bf16 all within one unit in the last
// place and 99.5 % rounded right.
bool is_close(const Array& found, Dtype dtype, const std::vector<double>& exact) {
  size_t off = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double error = std::fabs(found[i] - exact[i]), size = std::fabs(exact[i]);
    if (std::isnan(exact[i]) || std::isinf(exact[i])) {
      if (std::isnan(exact[i]) ? !std::isnan(found[i]) : found[i] != exact[i]) return false;
    } else if (size < 1e-36) {
      if (!(std::fabs(found[i]) < 1e-36)) return false;
    } else if (dtype == kF32) {
      if (!(error <= 5e-7 * size)) return false;
    } else {
      const double ulp = std::ldexp(1.0, std::ilogb(size) - 7);
      if (!(error <= ulp)) return false;
      off += error > 0.5 * ulp;
    }
  }
  return off * 200 <= exact.size();
}

void test(const Case& c) {
  const Operands operands(c);
  const Exact exact(c, operands);
  const Results results(c, operands, 0);
  const double tolerance = c.dtype == kF32 ? 1e-6 : 4e-3;
  c.expect(is_close(results.y, c.dtype, exact.y), "y");
  c.expect(results.dx.error(exact.dx) < tolerance, "dx");
  c.expect(results.dgate.error(exact.dgate) < tolerance, "dgate");
  c.expect(results.dscale.error(exact.dscale) < 5e-6, "dscale");
  if (c.cols > 5120) return;
  const Results unaligned(c, operands, 1);
  c.expect(unaligned == results && unaligned.dscale.error(exact.dscale) < 5e-6, "unaligned arrays");
}

// Gates that overflow somewhere on the way, each in a row of its own.
void test_extremes(Case c) {
  constexpr float extremes[] = {INFINITY, -INFINITY, NAN, 100, -100, 3e38f, -3e38f};
  c.rows = std::size(extremes);
  Operands operands(c);
  for (int64_t row = 0; row < c.rows; ++row) operands.gate.set(row * c.cols + row, extremes[row]);
  // What this one is multiplied by overflows f32, unless it is 0.
  operands.x.set(5 * c.cols + 5, 0);
  operands.dy.set(5 * c.cols + 5, 0);
  const Exact exact(c, operands);
  const Results results(c, operands, 0);
  c.expect(is_close(results.y, c.dtype, exact.y), "y of extreme gates");
  for (int64_t i = 3 * c.cols; i < c.elements(); ++i) {
    const bool finite = std::isfinite(results.dx[i]) && std::isfinite(results.dgate[i]);
    if (!finite) return c.expect(false, "gradients of extreme gates");
  }
}

template <typename F>
void for_each_way(F f) {
  for (const Dtype dtype : {kF32, kBf16})
    for (const Activation activation : {Activation::silu, Activation::sigmoid})
      for (const bool first : {true, false}) f(dtype, activation, first);
}

void test_all(int64_t rows, int64_t cols) {
  tier.begin_shape();
  for_each_way([&](Dtype dtype, Activation activation, bool first) {
    for (const int64_t count : {1, 8}) {
      if (!tier.takes()) continue;
      // Which weights there are makes little difference: another choice each time.
      const int turn = static_cast<int>(activation) + (count > 1) + (cols > 1024 ? first : 0);
      test({dtype, turn % 2 ? kBf16 : kF32, activation, first, turn % 3 < 2, rows, cols, count});
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) {
    test_all(std::atoll(argv[1]), std::atoll(argv[2]));
  } else {
    for (const int64_t cols : {64, 100, 128, 256, 1024})
      for (const int64_t rows : {1, 3, 40, 41}) test_all(rows, cols);
    for (const int64_t cols : {64, 128, 256}) test_all(600, cols);
    for (const int64_t cols : {512, 1024, 4096, 5120}) test_all(65, cols);
    for (const int64_t cols : {512, 1536, 4096, 5120, 8192, 12288, 16384}) test_all(9, cols);
    for_each_way([](Dtype dtype, Activation activation, bool first) {
      for (const int64_t cols : {96, 100, 4096}) test_extremes({dtype, kF32, activation, first, true, 0, cols, 1});
    });
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
