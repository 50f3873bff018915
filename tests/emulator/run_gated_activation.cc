// Runs the CUDA kernels of gated activations on the host and compares results and gradients with the formulas in
// float64, and what arrays give that are aligned to 16 bytes with what others do, bit for bit; and quantised results
// with the arithmetic of `Quantization`, bit for bit.
#include <cstdio>
#include <initializer_list>

#include "array.h"
#include "ops/gated_activation/cuda.h"
#include "ops/shared/cuda/activation.cuh"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

constexpr Dtype kF32 = Dtype::f32, kBf16 = Dtype::bf16;
constexpr Activation kActivations[] = {Activation::silu, Activation::sigmoid, Activation::relu2, Activation::gelu,
                                       Activation::gelu_exact};
int failures = 0;

// packed: one array holds gate and up, side by side in each row.
struct Case {
  Dtype dtype;
  Activation activation;
  bool packed;
  int64_t rows, cols;

  int64_t elements() const { return rows * cols; }
  int64_t stride() const { return packed ? 2 * cols : cols; }
  // Where element i of the result has its gate, in the one array or in one of two.
  int64_t place(int64_t i) const { return i / cols * stride() + i % cols; }

  void expect(bool holds, const char* what) const {
    if (holds) return;
    ++failures;
    std::printf("%s: %s, %s, %s, %ld x %ld\n", what, dtype == kF32 ? "f32" : "bf16", name_of(activation),
                packed ? "one array" : "two arrays", rows, cols);
  }
};

struct Slope {
  double value, slope;
};

Slope activated(Activation activation, double v) {
  const auto logistic = [](double w) { return 1 / (1 + std::exp(-w)); };
  const double root = std::sqrt(8 / M_PI), w = root * (v + 0.044715 * v * v * v);
  const double normal = std::erfc(-v / std::sqrt(2)) / 2, density = std::exp(-v * v / 2) / std::sqrt(2 * M_PI);
  switch (activation) {
    case Activation::silu:
      return {v * logistic(v), logistic(v) * (1 + v * logistic(-v))};
    case Activation::sigmoid:
      return {logistic(v), logistic(v) * logistic(-v)};
    case Activation::relu2:
      return {v <= 0 ? 0 : v * v, v > 0 ? 2 * v : 0};
    case Activation::gelu:
      return {v * logistic(w), logistic(w) * (1 + v * root * (1 + 3 * 0.044715 * v * v) * logistic(-w))};
    default:
      return {v * normal, normal + v * density};
  }
}

struct Operands {
  Array gate, up, dy;

  explicit Operands(const Case& c)
      : gate(Array::normal(c.dtype, c.elements(), 0)),
        up(Array::normal(c.dtype, c.elements(), 0)),
        dy(Array::normal(c.dtype, c.elements(), 0)) {
    for (int64_t i = 0; i < c.elements(); ++i) gate.set(i, 3 * gate[i]);
  }
};

struct Results {
  Array y, dgate, dup;

  // `offset`: of each array, in elements, so that it is aligned to them and to nothing more.
  Results(const Case& c, const Operands& o, int64_t offset)
      : y(c.dtype, c.elements(), offset), dgate(c.dtype, c.elements()), dup(c.dtype, c.elements()) {
    const int64_t elements = c.rows * c.stride();
    const auto array = [&] { return Array(c.dtype, elements + 1, offset); };  // one more: the last stays as it was
    Array gate = array(), up = array(), dy = array(), of_gate = array(), of_up = array();
    const auto behind = [&](Array& first, Array& second) -> Output {
      const Output all = first;
      if (!c.packed) return second;
      return {static_cast<char*>(all.data) + c.cols * size_of(c.dtype), c.dtype};
    };
    for (int64_t i = 0; i < c.elements(); ++i) {
      gate.set(c.place(i), o.gate[i]);
      if (c.packed) gate.set(c.place(i) + c.cols, o.up[i]);
      if (!c.packed) up.set(i, o.up[i]);
      dy.set(i, o.dy[i]);
    }
    // Two arrays come as one long row.
    const GatedShape shape = c.packed ? GatedShape{c.rows, c.cols, c.stride()} : GatedShape{1, elements, elements};
    const Output up_there = behind(gate, up);
    const Input up_in{up_there.data, c.dtype};
    expect_run(c, GatedActivationForward{shape, gate, up_in, y, c.activation}, "forward");
    const GatedActivationBackward b{shape, dy, gate, up_in, of_gate, behind(of_gate, of_up), c.activation};
    expect_run(c, b, "backward");
    for (int64_t i = 0; i < c.elements(); ++i) {
      dgate.set(i, of_gate[c.place(i)]);
      dup.set(i, c.packed ? of_gate[c.place(i) + c.cols] : of_up[i]);
    }
    c.expect(std::isnan(of_gate[elements]), "what is behind the gradient");
    if (c.packed) return;
    Array alone = array();
    GatedActivationBackward one = b;
    one.dgate = alone, one.dup = {};
    expect_run(c, one, "dgate alone");
    c.expect(alone == of_gate, "dgate alone");
    one.dgate = {}, one.dup = alone;
    expect_run(c, one, "dup alone");
    c.expect(alone == of_up, "dup alone");
  }

  template <typename Op>
  static void expect_run(const Case& c, const Op& op, const char* what) {
    c.expect(run(op, nullptr) == cudaSuccess, what);
  }

  bool operator==(const Results& r) const { return y == r.y && dgate == r.dgate && dup == r.dup; }
};

// The relative L2 error is below the tolerance.
bool is_close(const Array& found, const std::vector<double>& exact, double tolerance) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    difference += (found[i] - exact[i]) * (found[i] - exact[i]);
    size += exact[i] * exact[i];
  }
  return std::sqrt(difference) <= tolerance * std::sqrt(size);
}

void test(const Case& c) {
  const Operands o(c);
  std::vector<double> y, dgate, dup;
  for (int64_t i = 0; i < c.elements(); ++i) {
    const Slope a = activated(c.activation, o.gate[i]);
    y.push_back(a.value * o.up[i]);
    dgate.push_back(o.dy[i] * o.up[i] * a.slope);
    dup.push_back(o.dy[i] * a.value);
  }
  const Results results(c, o, 0);
  const double tolerance = c.dtype == kF32 ? 5e-7 : 4e-3;
  c.expect(is_close(results.y, y, tolerance), "y");
  c.expect(is_close(results.dgate, dgate, tolerance), "dgate");
  c.expect(is_close(results.dup, dup, tolerance), "dup");
  c.expect(Results(c, o, 1) == results, "unaligned arrays");
}

// What is quantised has the bits of the activation's f32 result.
template <typename A>
float product(float gate, float up) {
  return A::template of<float>(gate) * up;
}

float product(Activation activation, float gate, float up) {
  switch (activation) {
    case Activation::silu:
      return product<Silu>(gate, up);
    case Activation::sigmoid:
      return product<Sigmoid>(gate, up);
    case Activation::relu2:
      return product<Relu2>(gate, up);
    case Activation::gelu:
      return product<Gelu>(gate, up);
    default:
      return product<GeluExact>(gate, up);
  }
}

uint8_t code(float v, Dtype to) {
  if (to == Dtype::s8) return static_cast<uint8_t>(std::nearbyint(std::min(127.0f, std::max(-127.0f, v))));
  return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, to == Dtype::f8e4m3fn ? __NV_E4M3 : __NV_E5M2);
}

// group: how many columns share a scale; 0: it is given.
void test_quantized(const Case& c, Dtype to, int64_t group, int64_t offset) {
  const Operands o(c);
  Array gate(c.dtype, c.rows * c.stride(), offset), up(c.dtype, c.elements(), offset);
  for (int64_t i = 0; i < c.elements(); ++i) {
    gate.set(c.place(i), o.gate[i]);
    if (c.packed) gate.set(c.place(i) + c.cols, o.up[i]);
    up.set(i, o.up[i]);
  }
  const int64_t shared = group == 0 ? c.cols : group;
  Array values(Dtype::s8, c.elements(), offset), scales(kF32, c.elements() / shared), given(kF32, 1);
  given.set(0, 0.013f);
  GatedActivationQuantizedForward p{};
  static_cast<GatedShape&>(p) = {c.rows, c.cols, c.stride()};
  p.gate = gate, p.up = up, p.activation = c.activation;
  if (c.packed) p.up.data = static_cast<const char*>(p.gate.data) + c.cols * size_of(c.dtype);
  p.quantized.values = {static_cast<Output>(values).data, to};
  p.quantized.group = shared, p.quantized.max_scale = INFINITY;
  if (group == 0) p.quantized.given = given.floats();
  if (group > 0) p.quantized.scales = scales.floats();
  c.expect(run(p, nullptr) == cudaSuccess, "quantised");
  for (int64_t begin = 0; begin < c.elements(); begin += shared) {
    float amax = 0;
    const auto v = [&](int64_t i) { return product(c.activation, o.gate[i], o.up[i]); };
    for (int64_t i = begin; i < begin + shared; ++i) amax = std::max(amax, std::fabs(v(i)));
    const float scale = group == 0 ? 0.013f : amax == 0 ? 1 : std::max(amax / largest_of(to), kSmallestScale);
    if (group > 0) c.expect(scales[begin / shared] == scale, "scale");
    for (int64_t i = begin; i < begin + shared; ++i)
      if (values.byte(i) != code(v(i) * (1 / scale), to)) return c.expect(false, "values");
  }
}

void test_quantized(const Case& c) {
  for (const int64_t offset : {0, 1})
    for (const Dtype to : {Dtype::f8e4m3fn, Dtype::s8})
      for (const int64_t group : {int64_t{0}, c.cols, int64_t{32}, int64_t{64}, int64_t{128}})
        if (c.cols % std::max<int64_t>(1, group) == 0 && tier.takes()) test_quantized(c, to, group, offset);
}

// What a gate lets through that overflows somewhere on the way, or is no number.
void test_extremes(Case c) {
  constexpr float extremes[] = {INFINITY, -INFINITY, NAN, 100, -100, 3e38f, -3e38f, 0, -0.0f};
  c.rows = std::size(extremes);
  Operands o(c);
  for (int64_t row = 0; row < c.rows; ++row) o.gate.set(row * c.cols + row, extremes[row]);
  const Results results(c, o, 0);
  for (int64_t i = 0; i < c.elements(); ++i) {
    const double v = o.gate[i], value = activated(c.activation, v).value;
    const double y = static_cast<float>(value * o.up[i]);  // which may overflow
    const double found = results.y[i];
    const bool alike = std::isfinite(y) ? std::fabs(found - y) <= std::fabs(y) / 100 + 1e-30
                                        : (std::isnan(y) ? std::isnan(found) : found == y);
    c.expect(alike, "y of extreme gates");
    if (c.activation == Activation::relu2 && !(v > 0)) c.expect(results.dgate[i] == 0, "what no gate lets through");
  }
}

}  // namespace

int main() {
  for (const int64_t cols : {1, 7, 8, 60, 64, 520, 1021, 4096, 5000})
    for (const int64_t rows : {1, 3, 41}) {
      tier.begin_shape();
      for (const Dtype dtype : {kF32, kBf16})
        for (const Activation activation : kActivations)
          for (const bool packed : {true, false})
            if (tier.takes()) test({dtype, activation, packed, rows, cols});
    }
  test({kBf16, Activation::silu, true, 0, 64});
  for (const int64_t cols : {1, 31, 64, 128, 768, 1021, 4096, 14336, 16384, 20480}) {
    tier.begin_shape();
    for (const Dtype dtype : {kF32, kBf16})
      for (const Activation activation : kActivations)
        for (const bool packed : {true, false})
          if (tier.takes()) test_quantized({dtype, activation, packed, 3, cols});
  }
  for (const Activation activation : kActivations)
    for (const Dtype dtype : {kF32, kBf16}) test_extremes({dtype, activation, true, 0, 72});
  std::printf("%d failures\n", failures);
  return failures > 0;
}
