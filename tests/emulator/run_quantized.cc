// Runs the CUDA kernels on the host and compares quantised results, bit for bit, with the f32 y of the same norm
// quantised number by number; of gated norms with the y that follows, number by number, from their statistics.
//
//   run_quantized              every regime
//   run_quantized ROWS COLS    one shape
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "array.h"
#include "ops/norm/cuda.h"
#include "ops/shared/cuda/activation.cuh"

namespace {

using namespace jaxnorm;

constexpr Dtype kF32 = Dtype::f32, kBf16 = Dtype::bf16;
int failures = 0;

// The number that the code of an 8-bit float without its sign stands for.
double decode(Dtype dtype, int code) {
  const int bits = dtype == Dtype::f8e4m3fn ? 3 : 2, bias = dtype == Dtype::f8e4m3fn ? 7 : 15;
  const int exponent = code >> bits, fraction = code & ((1 << bits) - 1);
  return exponent ? std::ldexp((1 << bits) + fraction, exponent - bias - bits) : std::ldexp(fraction, 1 - bias - bits);
}

bool is_code_of(Dtype dtype, uint8_t code, float value) {
  const float largest = largest_of(dtype);
  if (dtype == Dtype::s8)
    return static_cast<int8_t>(code) ==
           (std::isnan(value) ? 0 : std::nearbyint(std::fmin(std::fmax(value, -largest), largest)));
  const int highest = dtype == Dtype::f8e4m3fn ? 0x7e : 0x7b;  // of a number
  if (std::isnan(value)) return dtype == Dtype::f8e4m3fn ? (code & 0x7f) == 0x7f : (code & 0x7f) > 0x7c;
  int nearest = 0;
  const double magnitude = std::fmin(std::fabs(value), largest);
  while (nearest < highest && magnitude >= decode(dtype, nearest + 1)) ++nearest;
  if (nearest < highest) {
    const double middle = (decode(dtype, nearest) + decode(dtype, nearest + 1)) / 2;
    if (magnitude > middle || (magnitude == middle && nearest % 2)) ++nearest;
  }
  return code == (nearest | (std::signbit(value) ? 0x80 : 0));
}

float scale_of(const Quantization& q, float amax) {
  if (amax == 0 || std::isnan(amax)) return amax == 0 ? 1 : amax;
  float scale = amax / largest_of(q.values.dtype);
  if (q.power_of_two && !std::isinf(scale)) {
    int exponent;
    const float fraction = std::frexp(scale, &exponent);
    scale = std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
  }
  return std::fmin(std::fmax(scale, 0x1p-126f), q.max_scale);
}

// Whether `values` and `scales` are those of y.
bool is_quantized(const QuantizedNormForward& f, const Array& y, const Array* smooth, const Array& values,
                  const Array& scales) {
  const Quantization& q = f.quantized;
  const int64_t weights = f.weight_rows.count * f.cols;
  for (int64_t begin = 0; begin < f.rows * f.cols; begin += q.group) {
    std::vector<float> v(q.group);
    float amax = 0;
    for (int64_t i = 0; i < q.group; ++i) {
      v[i] = smooth ? y[begin + i] * (*smooth)[(begin + i) % weights] : y[begin + i];
      amax = std::isnan(amax) || std::isnan(v[i]) ? NAN : std::fmax(amax, std::fabs(v[i]));
    }
    const float scale = q.given ? *q.given : scale_of(q, amax);
    if (!q.given) {
      const float found = scales[begin / q.group];
      if (std::isnan(scale) ? !std::isnan(found) : std::memcmp(&scale, &found, sizeof scale) != 0) return false;
    }
    const float reciprocal = 1 / scale;
    for (int64_t i = 0; i < q.group; ++i)
      if (!is_code_of(q.values.dtype, values.byte(begin + i), v[i] * reciprocal)) return false;
  }
  return true;
}

// What of a call does not decide which kernel it takes, or only between two: one after the other has its turn.
class Turns {
 public:
  template <typename T>
  T next(std::initializer_list<T> all) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return all.begin()[(state_ >> 33) % all.size()];
  }

 private:
  uint64_t state_ = 1;
};

enum class Addend { none, same, f32 };

// `offset`: of each array, in elements. group 0: the scale is given.
void test(Kind kind, Dtype dtype, Addend addend_is, int64_t rows, int64_t cols, int64_t group, int64_t offset,
          bool plain) {
  static Turns turns;
  const int64_t elements = rows * cols;
  const bool adds = addend_is != Addend::none;
  const Dtype sum_dtype = addend_is == Addend::f32 ? kF32 : dtype;
  auto x = Array::normal(dtype, elements, offset);
  const auto addend = Array::normal(sum_dtype, elements, offset);
  Array sum(sum_dtype, elements, offset), fused_sum(sum_dtype, elements, offset);
  if (rows > 3 && !adds)
    for (int64_t i = 0; i < cols; ++i) {
      x.set(i, 0);
      x.set(cols + i, i == cols / 2 ? NAN : 1);
      x.set(2 * cols + i, i == cols / 3 ? INFINITY : 1);
    }
  for (int64_t i = 0; i < elements; ++i) {
    sum.set(i, adds ? x[i] + addend[i] : x[i]);
    fused_sum.set(i, addend[i]);
  }

  ScaledAddQuantizedNormForward f{};
  f.kind = kind, f.rows = rows, f.cols = cols, f.epsilon = 1e-6f, f.weight_rows = {};
  f.scale_offset = turns.next({0.0f, 1.0f});
  const auto weight = [&](Dtype of) { return Array::normal(of, cols, offset); };
  const Dtype of_weights = plain ? turns.next({dtype, kF32}) : turns.next({kF32, kBf16});
  auto scale = weight(of_weights);
  const auto bias = weight(plain ? of_weights : kBf16);
  for (int64_t i = 0; i < cols; i += 7) scale.set(i, -0.0f);  // zeros of the result have x's sign
  const auto smooth = weight(turns.next({dtype, kF32}));
  const bool has_scale = turns.next({true, true, !plain}),
             has_bias = plain ? kind == Kind::layer : turns.next({true, false});
  const bool has_smooth = turns.next({true, false});
  if (has_scale) f.scale = scale;
  if (has_bias) f.bias = bias;

  Array y(kF32, elements), mean(kF32, rows), rstd(kF32, rows), own_mean(kF32, rows), own_rstd(kF32, rows);
  NormForward norm{};
  static_cast<NormOperands&>(norm) = f;
  norm.x = sum, norm.y = y, norm.y_stride = cols, norm.multiply_before_cast = true;
  norm.mean = mean.floats(), norm.rstd = rstd.floats();
  bool holds = cuda::run(norm, nullptr) == cudaSuccess;

  const Dtype to = turns.next({Dtype::f8e4m3fn, Dtype::f8e5m2, Dtype::s8});
  const float given = turns.next({0.02f, 0.1f});
  Array values(to, elements, offset), scales(kF32, elements);
  f.x = x;
  if (adds) f.addend = fused_sum, f.sum = fused_sum;
  const bool statistics = turns.next({true, false});
  f.mean = statistics ? own_mean.floats() : nullptr, f.rstd = statistics ? own_rstd.floats() : nullptr;
  f.quantized.values = values, f.quantized.group = group ? group : cols;
  if (group) {
    f.quantized.scales = scales.floats();
  } else {
    f.quantized.given = &given;
  }
  if (has_smooth) f.quantized.smooth = smooth;
  const bool with_y = turns.next({true, false, false});
  Array rounded(dtype, elements), own_y(dtype, elements, offset);
  for (int64_t i = 0; i < elements; ++i) rounded.set(i, y[i]);
  if (with_y) f.y = own_y;
  f.quantized.power_of_two = turns.next({true, false});
  f.quantized.max_scale = turns.next({static_cast<float>(INFINITY), 0.004f});
  holds = holds && cuda::run(f, nullptr) == cudaSuccess;
  holds = holds && is_quantized(f, y, has_smooth ? &smooth : nullptr, values, scales) && (!adds || fused_sum == sum);
  holds = holds && (!with_y || own_y == rounded);
  holds = holds && (!statistics || (own_rstd == rstd && (kind == Kind::rms || own_mean == mean)));
  if (holds) return;
  ++failures;
  std::printf("%s, %s, addend %d, %ld x %ld, group %ld, offset %ld, to %d, %s weights, smooth %d, y %d\n",
              kind == Kind::rms ? "rms" : "layer", dtype == kF32 ? "f32" : "bf16", static_cast<int>(addend_is), rows,
              cols, group, offset, static_cast<int>(to), plain ? "plain" : "any", has_smooth, with_y);
}

void test_all(int64_t rows, int64_t cols, int64_t offset = 0) {
  tier.begin_shape();
  for (const Kind kind : {Kind::rms, Kind::layer})
    for (const Dtype dtype : {kF32, kBf16})
      for (const Addend addend : {Addend::none, Addend::same, Addend::f32})
        for (const int64_t group : {int64_t{0}, int64_t{32}, int64_t{64}, int64_t{128}, cols}) {
          if ((group && cols % group) || (addend == Addend::f32 && dtype == kF32)) continue;
          // The longest rows take seconds: one granularity of each norm.
          if (cols > 100'000 && (addend != Addend::none || group != (kind == Kind::rms ? cols : 128))) continue;
          if (!tier.takes()) continue;
          test(kind, dtype, addend, rows, cols, group, offset, true);
          if (addend == Addend::none && cols <= 2048) test(kind, dtype, addend, rows, cols, group, offset, false);
        }
}

struct GatedCase {
  Dtype dtype;
  Gate gate;
  int64_t rows, cols, group, offset, count;  // group 0: the scale is given
};

float activate(const GatedCase& c, float v) {
  return c.dtype == kF32 ? cuda::activate<float>(c.gate.activation, v)
                         : cuda::activate<__nv_bfloat16>(c.gate.activation, v);
}

// y in f32.
Array gated_result(const GatedCase& c, const GatedNormForward& f, const Array& x, const Array& gate,
                   const Array& scale) {
  Array y(kF32, c.rows * c.cols);
  for (int64_t i = 0; i < c.rows * c.cols; ++i) {
    const float a = activate(c, gate[i]), h = c.gate.first ? x[i] * a : x[i];
    const float factor = f.scale ? scale[i % (c.count * c.cols)] + f.scale_offset : 1;
    const float product = h * f.rstd[i / c.cols] * factor;
    y.set(i, c.gate.first ? product : product * a);
  }
  return y;
}

// The same rounded to the dtype of a result.
Array rounded(const Array& y, const GatedCase& c) {
  Array result(c.dtype, y.elements());
  for (int64_t i = 0; i < y.elements(); ++i) result.set(i, y[i]);
  return result;
}

void test_gated(GatedCase c) {
  static Turns turns;
  const int64_t elements = c.rows * c.cols;
  auto x = Array::normal(c.dtype, elements, c.offset), gate = Array::normal(c.dtype, elements, c.offset);
  for (int64_t i = 0; i < elements; ++i) gate.set(i, 4 * gate[i]);
  for (int64_t i = 0; i < c.cols && c.rows > 3; ++i) {
    x.set(i, 0);
    x.set(c.cols + i, i == c.cols / 2 ? NAN : 1);
    gate.set(2 * c.cols + i, i == c.cols / 3 ? INFINITY : 1);
  }
  const auto weight = [&] { return Array::normal(turns.next({c.dtype, kF32, kBf16}), c.count * c.cols, c.offset); };
  const auto scale = weight(), smooth = weight();
  const bool has_smooth = turns.next({true, false});

  Array y(c.dtype, elements), rstd(kF32, c.rows), own_rstd(kF32, c.rows);
  GatedNormForward norm{};
  norm.rows = c.rows, norm.cols = c.cols, norm.weight_rows = {c.count, 1}, norm.epsilon = 1e-6f;
  norm.scale_offset = turns.next({0.0f, 1.0f});
  c.gate.data = gate;
  norm.x = x, norm.gate = c.gate, norm.y = y, norm.rstd = rstd.floats();
  if (turns.next({true, true, false})) norm.scale = scale;
  bool holds = cuda::run(norm, nullptr) == cudaSuccess;
  const Array exact = gated_result(c, norm, x, gate, scale);
  holds = holds && rounded(exact, c) == y;

  const Dtype to = turns.next({Dtype::f8e4m3fn, Dtype::f8e5m2, Dtype::s8});
  const float given = turns.next({0.02f, 0.1f});
  Array values(to, elements, c.offset), scales(kF32, elements);
  GatedNormQuantizedForward f{};
  f.rows = c.rows, f.cols = c.cols, f.weight_rows = norm.weight_rows, f.epsilon = norm.epsilon;
  f.scale_offset = norm.scale_offset, f.x = norm.x, f.scale = norm.scale, f.gate = c.gate;
  f.rstd = turns.next({true, false}) ? own_rstd.floats() : nullptr;
  f.quantized.values = values, f.quantized.group = c.group ? c.group : c.cols;
  if (c.group) {
    f.quantized.scales = scales.floats();
  } else {
    f.quantized.given = &given;
  }
  if (has_smooth) f.quantized.smooth = smooth;
  f.quantized.power_of_two = turns.next({true, false});
  f.quantized.max_scale = turns.next({static_cast<float>(INFINITY), 0.004f});
  holds = holds && cuda::run(f, nullptr) == cudaSuccess;
  holds = holds && is_quantized(f, exact, has_smooth ? &smooth : nullptr, values, scales);
  if (holds && (!f.rstd || own_rstd == rstd)) return;
  ++failures;
  std::printf("gated, %s, %s, gate %s, %ld x %ld, group %ld, offset %ld, %ld weight_rows, to %d, smooth %d\n",
              c.dtype == kF32 ? "f32" : "bf16", c.gate.activation == Activation::silu ? "silu" : "sigmoid",
              c.gate.first ? "first" : "last", c.rows, c.cols, c.group, c.offset, c.count, static_cast<int>(to),
              has_smooth);
}

void test_all_gated(int64_t rows, int64_t cols, int64_t offset = 0) {
  tier.begin_shape();
  for (const Dtype dtype : {kF32, kBf16})
    for (const Activation activation : {Activation::silu, Activation::sigmoid})
      for (const bool first : {true, false})
        for (const int64_t group : {int64_t{0}, int64_t{32}, int64_t{64}, int64_t{128}, cols})
          if (group == 0 || cols % group == 0)
            if (tier.takes()) test_gated({dtype, {{}, activation, first}, rows, cols, group, offset, rows % 2 ? 1 : 4});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) {
    test_all(std::atoll(argv[1]), std::atoll(argv[2]));
    test_all_gated(std::atoll(argv[1]), std::atoll(argv[2]));
  } else {
    for (const int64_t cols : {1, 24, 64, 128, 192, 256, 257, 384, 512, 640, 1024}) test_all(13, cols);
    for (const int64_t cols : {64, 192, 1024}) test_all(5, cols, 1);
    for (const int64_t cols : {1536, 4097, 5376, 8192}) test_all(4, cols);
    for (const int64_t cols : {12288, 16384}) test_all(1, cols);
    test_all(130, 1536);  // more rows than have a block at once
    for (const int64_t cols : {64, 256}) test_all(1100, cols);
    test_all(260, 1024);
    test_all(5, 20480);  // clusters
    test_all(1, 20001);
    test_all(1, 300032);  // looped, or many vectors a thread
    for (const int64_t cols : {24, 64, 100, 128, 192, 256, 257, 512, 640, 1024}) {
      for (const int64_t rows : {12, 41}) test_all_gated(rows, cols);
    }
    for (const int64_t cols : {64, 192, 1024}) test_all_gated(5, cols, 1);
    for (const int64_t cols : {1536, 4097, 5376, 8192, 12288, 16384}) test_all_gated(4, cols);
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
