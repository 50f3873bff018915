// Runs the CUDA kernels of sandwich norms on the host and compares results and gradients with those of the two norms
// one after the other, bit for bit, and with the formulas in float64.
//
//   run_sandwich              every regime
//   run_sandwich ROWS COLS    one shape
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "array.h"
#include "cuda/engine/plan.h"
#include "ops/norm/cuda.h"
#include "ops/sandwich_norm/cuda.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

constexpr Dtype kF32 = Dtype::f32, kBf16 = Dtype::bf16;
constexpr float kEpsilon = 1e-6, kOffset = 0.5;
int failures = 0;

struct Case {
  Dtype dtype, addend, weights;
  bool scaled, rounds;
  int64_t rows, cols, offset;  // of each array, in elements, so that it is aligned to them and to nothing more

  int64_t elements() const { return rows * cols; }

  void expect(bool holds, const char* what) const {
    if (holds) return;
    ++failures;
    const auto name = [](Dtype dtype) { return dtype == kF32 ? "f32" : "bf16"; };
    std::printf("%s: %s, addend %s, weights %s,%s %ld x %ld, offset %ld\n", what, name(dtype), name(addend),
                scaled ? name(weights) : "absent", rounds ? " rounded," : "", rows, cols, offset);
  }
};

struct Operands {
  Array x, addend, post_scale, scale, dy, dsum;

  explicit Operands(const Case& c)
      : x(Array::normal(c.dtype, c.elements(), c.offset)),
        addend(Array::normal(c.addend, c.elements(), c.offset)),
        post_scale(Array::normal(c.weights, c.cols, c.offset)),
        scale(Array::normal(c.weights, c.cols, c.offset)),
        dy(Array::normal(c.dtype, c.elements(), c.offset)),
        dsum(Array::normal(c.addend, c.elements(), c.offset)) {}
};

// A result of each kind, as one call gives it and as two do.
struct Results {
  Array y, sum, post_rstd, rstd, dx, daddend, dpost_scale, dscale;

  explicit Results(const Case& c)
      : y(c.dtype, c.elements(), c.offset),
        sum(c.addend, c.elements(), c.offset),
        post_rstd(kF32, c.rows),
        rstd(kF32, c.rows),
        dx(c.dtype, c.elements(), c.offset),
        daddend(c.addend, c.elements(), c.offset),
        dpost_scale(c.weights, c.cols),
        dscale(c.weights, c.cols) {}

  bool operator==(const Results& r) const {
    return y == r.y && sum == r.sum && post_rstd == r.post_rstd && rstd == r.rstd;
  }
  bool has_gradients_of(const Results& r) const { return dx == r.dx && daddend == r.daddend && dscale == r.dscale; }
};

SandwichNormForward forward_of(const Case& c, const Operands& o, Results& r) {
  SandwichNormForward f{};
  f.rows = c.rows, f.cols = c.cols;
  f.x = o.x, f.addend = o.addend, f.y = r.y, f.sum = r.sum;
  f.post_rstd = r.post_rstd.floats(), f.rstd = r.rstd.floats();
  f.epsilon = kEpsilon, f.scale_offset = kOffset, f.multiply_before_cast = !c.rounds;
  if (c.scaled) f.post_scale = o.post_scale, f.scale = o.scale;
  return f;
}

SandwichNormBackward backward_of(const Case& c, const Operands& o, Results& r) {
  SandwichNormBackward b{};
  b.rows = c.rows, b.cols = c.cols;
  b.dy = o.dy, b.x = o.x, b.sum = r.sum, b.dsum = o.dsum;
  if (c.scaled) b.post_scale = o.post_scale, b.scale = o.scale, b.dpost_scale = r.dpost_scale, b.dscale = r.dscale;
  b.post_rstd = r.post_rstd.floats(), b.rstd = r.rstd.floats();
  b.dx = r.dx, b.daddend = r.daddend, b.scale_offset = kOffset;
  return b;
}

// By two calls each way, with an array between them: of x's dtype, as what is handed on is u and its cotangent. Where x
// is narrower than the addend, that would be rounded once more.
void run_two(const Case& c, const Operands& o, Results& r) {
  Array normed(c.dtype, c.elements(), c.offset);
  const SandwichNormForward f = forward_of(c, o, r);
  NormForward first = post_norm_of(f);
  ScaledAddNormForward second = add_norm_of(f);
  first.y = normed, second.x = normed;
  c.expect(run(first, nullptr) == cudaSuccess && run(second, nullptr) == cudaSuccess, "two calls");

  const SandwichNormBackward b = backward_of(c, o, r);
  NormBackward last = sum_grad_of(b, r.daddend), before = x_grad_of(b, r.daddend);
  Array received(c.dtype, c.elements(), c.offset);
  if (c.dtype == kF32) before.dy = received;
  const auto workspace_of = [&](Dtype dtype) {
    return Array(kF32, norm_grad_workspace({dtype, c.cols, 1, {}, true}).floats + c.rows * c.cols);
  };
  Array of_last = workspace_of(c.addend), of_before = workspace_of(c.dtype);
  last.workspace = of_last.workspace(), before.workspace = of_before.workspace();
  c.expect(run(last, nullptr) == cudaSuccess, "two calls backward");
  for (int64_t i = 0; i < c.elements(); ++i) received.set(i, r.daddend[i]);
  c.expect(run(before, nullptr) == cudaSuccess, "two calls backward");
}

void run_one(const Case& c, const Operands& o, Results& r) {
  c.expect(run(forward_of(c, o, r), nullptr) == cudaSuccess, "forward");
  const auto workspace_of = [&](bool keeps_row, bool widens_row) {
    const WorkspaceSize size = sandwich_norm_grad_workspace({c.dtype, c.cols, 2, {}, true, keeps_row, widens_row});
    return Array(kF32, size.floats + size.floats_a_row * c.rows);
  };
  const bool widens_row = c.dtype == kF32 && c.addend != kF32;
  Array workspace = workspace_of(false, widens_row);
  SandwichNormBackward b = backward_of(c, o, r);
  b.workspace = workspace.workspace();
  c.expect(run(b, nullptr) == cudaSuccess, "backward");

  // daddend is read and not wanted.
  Array dx(c.dtype, c.elements(), c.offset), with_row = workspace_of(true, widens_row);
  b.daddend = {}, b.dscale = {}, b.dpost_scale = {}, b.dx = dx;
  b.workspace = with_row.workspace();
  c.expect(run(b, nullptr) == cudaSuccess && dx == r.dx, "dx alone");
  if (!widens_row) return;

  // As a program has them that was exported by a build without widened rows.
  Array narrow_dx(c.dtype, c.elements(), c.offset), narrow = workspace_of(true, false);
  b.dx = narrow_dx;
  b.workspace = narrow.workspace();
  c.expect(run(b, nullptr) == cudaSuccess, "an older workspace");
  std::vector<double> values(c.elements());
  for (int64_t i = 0; i < c.elements(); ++i) values[i] = dx[i];
  c.expect(c.cols == 1 || narrow_dx.error(values) < 1e-6, "dx with an older workspace");
}

// The largest error of the sum, whose terms are two, and those of y and of the gradients, all for the sum that was
// stored and for the cotangent that was.
void compare(const Case& c, const Operands& o, const Results& r) {
  std::vector<double> sum(c.elements()), y(c.elements()), dx(c.elements()), daddend(c.elements());
  for (int64_t row = 0; row < c.rows; ++row) {
    const int64_t at = row * c.cols;
    const auto norm = [&](const Array& x, const Array& scale, const Array& dy, double* normed, double* gradient) {
      const auto factor = [&](int64_t i) { return c.scaled ? double{scale[i]} + kOffset : 1; };
      double squares = 0, product = 0;
      for (int64_t i = 0; i < c.cols; ++i) squares += double{x[at + i]} * x[at + i];
      const double rstd = 1 / std::sqrt(squares / c.cols + kEpsilon);
      for (int64_t i = 0; i < c.cols; ++i) product += dy[at + i] * factor(i) * x[at + i] * rstd;
      for (int64_t i = 0; i < c.cols; ++i) {
        normed[i] = x[at + i] * rstd * factor(i);
        gradient[i] = rstd * (dy[at + i] * factor(i) - x[at + i] * rstd * product / c.cols);
      }
    };
    norm(o.x, o.post_scale, r.daddend, sum.data() + at, dx.data() + at);
    norm(r.sum, o.scale, o.dy, y.data() + at, daddend.data() + at);
    for (int64_t i = at; i < at + c.cols; ++i) sum[i] += o.addend[i], daddend[i] += o.dsum[i];
  }
  const auto tolerance = [](Dtype dtype) { return dtype == kF32 ? 1e-6 : 6e-3; };
  const double of_sum = std::max(tolerance(c.dtype), tolerance(c.addend));
  c.expect(r.sum.error(sum) < of_sum, "sum");
  c.expect(r.y.error(y) < tolerance(c.dtype), "y");
  c.expect(r.dx.error(dx) < tolerance(c.dtype), "dx");
  c.expect(r.daddend.error(daddend) < of_sum, "daddend");
}

void test(const Case& c) {
  const Operands operands(c);
  Results one(c), two(c);
  run_one(c, operands, one);
  run_two(c, operands, two);
  c.expect(one == two, "bits");
  c.expect(!c.scaled || one.has_gradients_of(two), "bits of gradients");
  // Beside a cotangent of another type, sums over rows have an order of their own.
  const bool has_own_order = c.dtype == kF32 && c.addend != kF32 && c.cols % 4 == 0;
  c.expect(!c.scaled || has_own_order || one.dpost_scale == two.dpost_scale, "bits of dpost_scale");
  if (!c.rounds && c.cols > 1) compare(c, operands, one);

  // The sum where the addend was.
  Results in_place(c);
  SandwichNormForward f = forward_of(c, operands, in_place);
  for (int64_t i = 0; i < c.elements(); ++i) in_place.sum.set(i, operands.addend[i]);
  f.addend = in_place.sum;
  c.expect(run(f, nullptr) == cudaSuccess && in_place == two, "in place");
}

void test_all(int64_t rows, int64_t cols) {
  for (const Dtype dtype : {kF32, kBf16}) {
    const Dtype other = dtype == kF32 ? kBf16 : kF32;
    for (const Dtype weights : {kF32, kBf16}) test({dtype, dtype, weights, true, false, rows, cols, 0});
    test({dtype, dtype, dtype, true, true, rows, cols, 0});
    test({dtype, dtype, dtype, false, false, rows, cols, 0});
    test({dtype, other, kF32, true, false, rows, cols, 0});
    if (cols < 5000) test({dtype, dtype, dtype, true, false, rows, cols, 1});
  }
}

// A row of zeros, whose x_hat is infinite past its end, and rows of what is not finite.
void test_extremes(Dtype dtype, int64_t cols) {
  const Case c{dtype, dtype, dtype, true, false, 4, cols, 0};
  Operands operands(c);
  Results one(c), two(c);
  for (int64_t i = 0; i < cols; ++i) operands.x.set(i, 0);
  for (int64_t i = 0; i < cols; ++i) operands.x.set(cols + i, 1e-30f);
  operands.x.set(2 * cols + 1, INFINITY);
  operands.addend.set(3 * cols + 1, NAN);
  SandwichNormForward f = forward_of(c, operands, one), g = forward_of(c, operands, two);
  f.epsilon = g.epsilon = 0;
  Array normed(dtype, c.elements());
  NormForward first = post_norm_of(g);
  ScaledAddNormForward second = add_norm_of(g);
  first.y = normed, second.x = normed;
  const bool ran =
      run(f, nullptr) == cudaSuccess && run(first, nullptr) == cudaSuccess && run(second, nullptr) == cudaSuccess;
  c.expect(ran && one == two, "extremes");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) {
    test_all(std::atoll(argv[1]), std::atoll(argv[2]));
  } else {
    for (const int64_t cols : {1, 24, 64, 100, 128, 256, 257, 512, 1024})
      for (const int64_t rows : {1, 3, 9}) test_all(rows, cols);
    for (const int64_t cols : {64, 256}) test_all(300, cols);
    for (const int64_t cols : {1536, 2048, 4096, 4097, 5120, 8192, 10240, 12288, 16384, 20480}) test_all(3, cols);
    test({kF32, kBf16, kF32, true, false, 2, 200'000, 0});  // f32 in a cluster, beside a half type in segments
    for (const Dtype dtype : {kF32, kBf16})
      for (const int64_t cols : {24, 100, 256, 1040, 10240}) test_extremes(dtype, cols);
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
