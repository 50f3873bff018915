// Runs the CUDA kernels of GroupNorm on the host and compares results and gradients with the formulas in float64, and
// bit for bit what arrays give that are aligned to 16 bytes with what others do, and an example by itself with one
// among others.
//
//   run_group_norm                                  every regime
//   run_group_norm POSITIONS GROUPS GROUP_SIZE      one shape
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "array.h"
#include "ops/group_norm/cuda.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

constexpr Dtype kF32 = Dtype::f32, kBf16 = Dtype::bf16;
constexpr float kEpsilon = 1e-6, kOffset = 0.5;
int failures = 0;

struct Case : Groups {
  Dtype dtype, y_dtype;
  Activation activation;
  ExampleMap scales;  // one for all examples, or for each, or for those that have an index of an axis in common
  int64_t offset;     // of each array, in elements, so that it is aligned to them and to nothing more

  int64_t elements() const { return examples * positions * channels(); }
  int64_t rows() const { return scales.row(examples - 1) + 1; }

  void expect(bool holds, const char* what) const {
    if (holds) return;
    ++failures;
    std::printf("%s: %d to %d, activation %d, %ld examples of %ld x %ld groups of %ld, %ld scales, offset %ld\n", what,
                int(dtype), int(y_dtype), int(activation), examples, positions, groups, group_size, rows(), offset);
  }
};

struct Operands {
  Array x, scale, bias, dy;

  explicit Operands(const Case& c)
      : x(Array::normal(c.dtype, c.elements(), c.offset)),
        scale(Array::normal(kF32, c.rows() * c.channels(), c.offset)),
        bias(Array::normal(kF32, c.channels(), c.offset)),
        dy(Array::normal(c.y_dtype, c.elements(), c.offset)) {}
};

struct Results {
  Array y, mean, rstd, dx, dscale, dbias;

  Results(const Case& c, int64_t offset)
      : y(c.y_dtype, c.elements(), offset),
        mean(kF32, c.examples * c.groups),
        rstd(kF32, c.examples * c.groups),
        dx(c.dtype, c.elements(), offset),
        dscale(kF32, c.rows() * c.channels()),
        dbias(kF32, c.channels()) {}

  bool operator==(const Results& r) const {
    return y == r.y && mean == r.mean && rstd == r.rstd && dx == r.dx && dscale == r.dscale && dbias == r.dbias;
  }
};

GroupWeight weight_of(const Array& array, const ExampleMap& map = {}) {
  GroupWeight weight;
  static_cast<Input&>(weight) = array;
  weight.map = map;
  return weight;
}

// `share`: of the workspace that is wanted.
void run_both(const Case& c, const Operands& o, Results& r, double share = 1) {
  const auto workspace_of = [&](auto size_of) {
    const WorkspaceSize size = size_of({c.dtype, c.positions * c.group_size, 2, {c.groups, c.group_size}});
    return Array(kF32, static_cast<int64_t>(c.examples * c.groups * size.floats_a_row * share));
  };
  GroupNormForward f{};
  static_cast<Groups&>(f) = c;
  f.x = o.x, f.y = r.y, f.mean = r.mean.floats(), f.rstd = r.rstd.floats();
  f.scale = weight_of(o.scale, c.scales), f.bias = weight_of(o.bias);
  f.epsilon = kEpsilon, f.scale_offset = kOffset, f.activation = c.activation;
  Array forward = workspace_of(group_norm_workspace);
  f.workspace = forward.workspace();
  c.expect(run(f, nullptr) == cudaSuccess, "forward");

  Array y(c.y_dtype, c.elements(), c.offset);
  f.mean = f.rstd = nullptr, f.y = y;
  c.expect(run(f, nullptr) == cudaSuccess && y == r.y, "without statistics");

  GroupNormBackward b{};
  static_cast<Groups&>(b) = c;
  b.dy = o.dy, b.x = o.x, b.scale = f.scale, b.bias = f.bias;
  b.mean = r.mean.floats(), b.rstd = r.rstd.floats();
  b.dx = r.dx, b.dscale = r.dscale, b.dbias = r.dbias;
  b.scale_offset = kOffset, b.activation = c.activation;
  Array backward = workspace_of(group_norm_workspace);
  b.workspace = backward.workspace();
  c.expect(run(b, nullptr) == cudaSuccess, "backward");
}

double sigmoid(double v) { return 1 / (1 + std::exp(-v)); }

// The activation of z, and its slope.
std::pair<double, double> activated(Activation activation, double z) {
  const double root = std::sqrt(8 / M_PI), w = root * (z + 0.044715 * z * z * z);
  switch (activation) {
    case Activation::silu:
      return {z * sigmoid(z), sigmoid(z) * (1 + z * sigmoid(-z))};
    case Activation::relu:
      return {std::max(z, 0.0), z > 0};
    case Activation::gelu:
      return {z * sigmoid(w), sigmoid(w) * (1 + z * root * (1 + 3 * 0.044715 * z * z) * sigmoid(-w))};
    default:
      return {z, 1};
  }
}

// By one group of one example after the other.
struct Exact {
  std::vector<double> y, dx, dscale, dbias;

  Exact(const Case& c, const Operands& o)
      : y(c.elements()), dx(c.elements()), dscale(c.rows() * c.channels()), dbias(c.channels()) {
    for (int64_t example = 0; example < c.examples; ++example)
      for (int64_t group = 0; group < c.groups; ++group) of_group(c, o, example, group);
  }

 private:
  template <typename F>
  static void for_each(const Case& c, int64_t example, int64_t group, F f) {
    for (int64_t position = 0; position < c.positions; ++position)
      for (int64_t i = 0; i < c.group_size; ++i) {
        const int64_t channel = group * c.group_size + i;
        f((example * c.positions + position) * c.channels() + channel, channel);
      }
  }

  void of_group(const Case& c, const Operands& o, int64_t example, int64_t group) {
    const double count = c.positions * c.group_size;
    const auto mean_of = [&](auto f) {
      double sum = 0;
      for_each(c, example, group, [&](int64_t at, int64_t channel) { sum += f(at, channel); });
      return sum / count;
    };
    const double mean = mean_of([&](int64_t at, int64_t) { return o.x[at]; });
    const double rstd =
        1 / std::sqrt(mean_of([&](int64_t at, int64_t) { return (o.x[at] - mean) * (o.x[at] - mean); }) + kEpsilon);
    const auto scale_at = [&](int64_t channel) { return c.scales.row(example) * c.channels() + channel; };
    const auto x_hat = [&](int64_t at) { return (o.x[at] - mean) * rstd; };
    const auto factor = [&](int64_t channel) { return o.scale[scale_at(channel)] + kOffset; };
    const auto z = [&](int64_t at, int64_t channel) { return x_hat(at) * factor(channel) + o.bias[channel]; };
    const auto dz = [&](int64_t at, int64_t channel) {
      return o.dy[at] * activated(c.activation, z(at, channel)).second;
    };
    const auto g = [&](int64_t at, int64_t channel) { return dz(at, channel) * factor(channel); };
    const double g_mean = mean_of(g), gx = mean_of([&](int64_t at, int64_t n) { return g(at, n) * x_hat(at); });
    for_each(c, example, group, [&](int64_t at, int64_t channel) {
      y[at] = activated(c.activation, z(at, channel)).first;
      dx[at] = rstd * (g(at, channel) - g_mean - x_hat(at) * gx);
      dscale[scale_at(channel)] += dz(at, channel) * x_hat(at);
      dbias[channel] += dz(at, channel);
    });
  }
};

// The example that is the last of them by itself.
void compare_alone(const Case& c, const Operands& o, const Results& r) {
  if (c.examples < 2 || c.rows() > 1) return;
  Case alone = c;
  alone.examples = 1;
  Operands last(alone);
  const int64_t elements = alone.elements(), from = (c.examples - 1) * elements;
  for (int64_t i = 0; i < elements; ++i) last.x.set(i, o.x[from + i]), last.dy.set(i, o.dy[from + i]);
  for (int64_t i = 0; i < c.channels(); ++i) last.scale.set(i, o.scale[i]), last.bias.set(i, o.bias[i]);
  Results results(alone, c.offset);
  run_both(alone, last, results);
  bool same = true;
  for (int64_t i = 0; i < elements; ++i) same &= results.y[i] == r.y[from + i] && results.dx[i] == r.dx[from + i];
  c.expect(same, "an example by itself");
}

// Where all is exactly zero, as of groups of one element, what is left is rounding, of numbers that 1 / sqrt(epsilon)
// multiplies.
bool is_close(const Array& array, const std::vector<double>& exact, double tolerance) {
  const auto is_zero = [](double value) { return value == 0; };
  if (!std::all_of(exact.begin(), exact.end(), is_zero)) return array.error(exact) < tolerance;
  bool are_small = true;
  for (int64_t i = 0; i < array.elements(); ++i) are_small &= std::abs(array[i]) < tolerance / std::sqrt(kEpsilon);
  return are_small;
}

void test(const Case& c) {
  const Operands o(c);
  const Exact exact(c, o);
  Results r(c, c.offset);
  run_both(c, o, r);
  const auto tolerance = [](Dtype dtype) { return dtype == kF32 ? 1e-6 : 3e-3; };
  c.expect(is_close(r.y, exact.y, tolerance(c.y_dtype)), "y");
  c.expect(is_close(r.dx, exact.dx, tolerance(c.dtype == kF32 && c.y_dtype == kF32 ? kF32 : kBf16)), "dx");
  c.expect(is_close(r.dscale, exact.dscale, 5e-6), "dscale");
  c.expect(is_close(r.dbias, exact.dbias, 5e-6), "dbias");
  compare_alone(c, o, r);

  // The same values elsewhere, and less room, which changes how they are added up.
  Case moved = c;
  moved.offset = c.offset ? 0 : 1;
  Operands there(moved);
  for (int64_t i = 0; i < c.elements(); ++i) there.x.set(i, o.x[i]), there.dy.set(i, o.dy[i]);
  for (int64_t i = 0; i < o.scale.elements(); ++i) there.scale.set(i, o.scale[i]);
  for (int64_t i = 0; i < c.channels(); ++i) there.bias.set(i, o.bias[i]);
  Results results(moved, moved.offset);
  run_both(moved, there, results);
  c.expect(results == r, "unaligned arrays");
  const int64_t least = 2 * c.group_size + 2;
  const auto wanted =
      group_norm_workspace({c.dtype, c.positions * c.group_size, 2, {c.groups, c.group_size}}).floats_a_row;
  if (wanted == least) return;
  Results narrow(c, c.offset);
  run_both(c, o, narrow, static_cast<double>(least) / wanted);
  c.expect(is_close(narrow.y, exact.y, tolerance(c.y_dtype)), "y with less room");
}

void test_shape(int64_t positions, int64_t groups, int64_t group_size) {
  using A = Activation;
  tier.begin_shape();
  for (const auto [dtype, y_dtype] : {std::pair{kF32, kF32}, {kBf16, kBf16}, {kBf16, kF32}, {kF32, kBf16}})
    for (const A activation : {A::none, A::silu, A::relu, A::gelu})
      for (const bool by_example : {false, true}) {
        const ExampleMap scales = by_example ? ExampleMap{1, {3}, {1}} : ExampleMap{};
        if (tier.takes())
          test({{3, positions, groups, group_size}, dtype, y_dtype, activation, scales, by_example ? 0 : 1});
      }
}

// More examples than threads sum up at once, of two axes: a scale for each index of the first, or of the second.
void test_shared_scales() {
  for (const int64_t first : {2, 13})
    for (const bool of_first : {false, true}) {
      const int64_t second = 26 / first;
      const ExampleMap scales{2, {first, second}, {of_first, !of_first}};
      test({{26, 7, 5, 3}, kF32, kF32, Activation::silu, scales, 0});
    }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4) {
    test_shape(std::atol(argv[1]), std::atol(argv[2]), std::atol(argv[3]));
  } else {
    // Instance norm, one group, groups that vectors cross, channels that they do not divide, several slices; fewer
    // positions than rows of threads, a chunk, several; and parts that a block merges.
    for (const int64_t positions : {1, 7, 130})
      for (const auto [groups, size] : {std::pair{1, 1}, {5, 3}, {24, 1}, {1, 40}, {32, 4}, {4, 20}, {9, 32}})
        test_shape(positions, groups, size);
    test_shape(1100, 2, 8);
    test_shape(200, 1, 600);
    test_shared_scales();
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
