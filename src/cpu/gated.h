// The norm that is gated: what is normalised, or y, is multiplied by a = activation(gate).
//
// The activation is computed once each way, in the pass that reads the gate from memory; what later passes want of it
// is kept as float32 in rows that stay in the cache.
#pragma once

#include "cpu/row.h"
#include "cpu/types.h"
#include "norm.h"

namespace jaxnorm::cpu {
namespace {

// exp(-|v|) to about 1 ulp; 0 where that is subnormal, as it is to XLA's threads.
Vec exp_of_minus_magnitude(Vec v) {
  // ln 2 in two parts, of which the first is short enough for its product with k to be exact.
  constexpr float kLog2e = 0x1.715476p+0f, kLn2 = 0x1.62e4p-1f, kLn2Rest = 0x1.7f7d1cp-20f;
  constexpr float kShift = 0x1.8p23f;  // adding it leaves the rounded number in the last bits
  constexpr float kLeast = -0x1.5d589ep+6f;
  const Vec t = (Vec)((Bits)v | 0x80000000u);
  const Vec shifted = fma(t, broadcast(kLog2e), broadcast(kShift)), k = shifted - kShift;
  const Vec r = fma(k, broadcast(-kLn2Rest), fma(k, broadcast(-kLn2), t));
  // exp(r) for |r| <= ln(2) / 2 by its series, of which the first term left out is below 2^-27.
  constexpr float kSeries[] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2};
  Vec p = broadcast(1.f / 5040);
  for (const float coefficient : kSeries) p = fma(p, r, broadcast(coefficient));
  const Vec exp_r = fma(p, r * r, r) + 1;
  const Vec power = (Vec)(((Bits)shifted << 23) + 0x3f800000u);
  return t < kLeast ? Vec{} : exp_r * power;
}

struct Activated {
  Vec value, slope;
};

// of(v) loses nothing where sigmoid(v) is close to 0, and slope nothing where it is close to 1.
struct Sigmoid {
  static Vec of(Vec v) {
    const Vec e = exp_of_minus_magnitude(v);
    return (v < 0 ? e : broadcast(1)) / (1 + e);
  }

  static Activated with_slope(Vec v) {
    const Vec e = exp_of_minus_magnitude(v), larger = 1 / (1 + e), smaller = e * larger;
    return {v < 0 ? smaller : larger, larger * smaller};
  }
};

struct Silu {
  static Vec of(Vec v) {
    const Vec e = exp_of_minus_magnitude(v);
    return (v < 0 ? v * e : v) / (1 + e);
  }

  static Activated with_slope(Vec v) {
    const Vec e = exp_of_minus_magnitude(v), larger = 1 / (1 + e), smaller = e * larger;
    const Vec sigmoid = v < 0 ? smaller : larger, value = v * sigmoid;
    return {value, fma(value, v < 0 ? larger : smaller, sigmoid)};
  }
};

// Calls f(X{}, A{}) with the types that stand for the dtype of all rows and for the activation.
template <class F>
void with_gate(Dtype dtype, Activation activation, F f) {
  with_type(dtype, [&](auto x) { activation == Activation::silu ? f(x, Silu{}) : f(x, Sigmoid{}); });
}

template <class T>
const T* row_of(Input input, int64_t cols, int64_t row) {
  return static_cast<const T*>(input.data) + row * cols;
}

template <class T>
Result<T> row_of(Output output, int64_t cols, int64_t row, int64_t traffic) {
  if (!output) return {nullptr, false};
  return {static_cast<T*>(output.data) + row * cols, is_streamed(traffic, output, cols)};
}

Weight scale_of(Input scale, RowMap weight_rows, int64_t cols, int64_t row) {
  return {scale ? static_cast<const float*>(scale.data) + weights_of(weight_rows, row, cols) : nullptr, 1};
}

// Normalises rows [first, first + count), of which there are R at most. `products` has room for these rows.
template <int R, class X, class A>
void gated_forward_rows(const Forward& f, int64_t first, int64_t count, int64_t ahead, int64_t traffic,
                        float* products) {
  const X* const x = row_of<X>(f.x, f.cols, first);
  const X* const gate = row_of<X>(f.gate.data, f.cols, first);
  Rms stats[R];
  if (f.gate.first) {
    for_each_vector(count * f.cols, [&](int64_t i, auto extent) {
      store(products + i, load(x + i, extent) * A::of(load(gate + i, extent)), extent);
    });
    Rms::of<R>(Rows<R, float>({products, Dtype::f32}, f.cols, 0, count), f.cols, f.epsilon, stats);
  } else {
    Rms::of<R>(Rows<R, X>(f.x, f.cols, first, count), f.cols, f.epsilon, stats);
  }
  for (int64_t row = 0; row < count; ++row) {
    const Rms of_row = stats[row];
    if (f.rstd) f.rstd[first + row] = of_row.rstd;
    const Weight scale = scale_of(f.scale, f.weight_rows, f.cols, first + row);
    const Result<X> y = row_of<X>(f.y, f.cols, first + row, traffic);
    if (f.gate.first) {
      const float* const product = products + row * f.cols;
      for_each_vector(f.cols, [&](int64_t column, auto extent) {
        y(column, of_row.x_hat(load(product + column, extent)) * scale(column, extent), extent);
      });
    } else {
      const LastPass<X> last_x{x + row * f.cols, ahead}, last_gate{gate + row * f.cols, ahead};
      for_each_vector(f.cols, [&](int64_t column, auto extent) {
        const Vec a = A::of(last_gate(column, extent));
        y(column, of_row.x_hat(last_x(column, extent)) * scale(column, extent) * a, extent);
      });
    }
  }
}

template <int R>
void gated_forward(const Forward& f, int64_t begin, int64_t end, int64_t traffic) {
  float products[kGatedCols];
  with_gate(f.x.dtype, f.gate.activation, [&](auto x, auto a) {
    using X = decltype(x);
    const int64_t ahead = elements_ahead(traffic, R * f.cols, sizeof(X));
    for (int64_t row = begin; row < end; row += R) {
      const int64_t count = end - row < R ? end - row : R;
      gated_forward_rows<R, X, decltype(a)>(f, row, count, ahead, traffic, products);
    }
  });
  fence();
}

// The cotangents of a row that was multiplied by its activations, h = x * a, and then normalised. `value` and `slope`
// have room for a row.
template <class X, class A>
void backward_of_gated_first(const Backward& b, int64_t row, float* dscale, int64_t traffic, float* value,
                             float* slope) {
  const X *const x = row_of<X>(b.x, b.cols, row), *const dy = row_of<X>(b.dy, b.cols, row);
  const X* const gate = row_of<X>(b.gate.data, b.cols, row);
  const Result<X> dx = row_of<X>(b.dx, b.cols, row, traffic), dgate = row_of<X>(b.dgate, b.cols, row, traffic);
  const Weight scale = scale_of(b.scale, b.weight_rows, b.cols, row);
  const Rms stats{b.rstd[row]};
  const auto total = sum<1, 1>(b.cols, [&](int, int64_t column, auto extent, Vec* sums) {
    const Activated a = A::with_slope(load(gate + column, extent));
    store(value + column, a.value, extent);
    store(slope + column, a.slope, extent);
    const Vec g = load(dy + column, extent) * scale(column, extent);
    sums[0] = fma(g, stats.x_hat(load(x + column, extent) * a.value), sums[0]);
  });
  const Vec minus_mean = broadcast(-total.mean(0, 0));
  for_each_vector(b.cols, [&](int64_t column, auto extent) {
    const Vec d = load(dy + column, extent), v = load(x + column, extent), a = load(value + column, extent);
    const Vec h_hat = stats.x_hat(v * a);
    const Vec dh = fma(h_hat, minus_mean, d * scale(column, extent)) * stats.rstd;
    if (dx.data) dx(column, dh * a, extent);
    if (dgate.data) dgate(column, dh * v * load(slope + column, extent), extent);
    if (dscale) store(dscale + column, fma(d, h_hat, load(dscale + column, extent)), extent);
  });
}

// The cotangents of a row that was normalised and then multiplied by its activations. `cotangent`, of what was
// multiplied by them, has room for a row.
template <class X, class A>
void backward_of_gated_last(const Backward& b, int64_t row, float* dscale, int64_t traffic, float* cotangent) {
  const X *const x = row_of<X>(b.x, b.cols, row), *const dy = row_of<X>(b.dy, b.cols, row);
  const X* const gate = row_of<X>(b.gate.data, b.cols, row);
  const Result<X> dx = row_of<X>(b.dx, b.cols, row, traffic), dgate = row_of<X>(b.dgate, b.cols, row, traffic);
  const Weight scale = scale_of(b.scale, b.weight_rows, b.cols, row);
  const Rms stats{b.rstd[row]};
  const auto total = sum<1, 1>(b.cols, [&](int, int64_t column, auto extent, Vec* sums) {
    const Activated a = A::with_slope(load(gate + column, extent));
    const Vec d = load(dy + column, extent), u = d * a.value, factor = scale(column, extent);
    const Vec x_hat = stats.x_hat(load(x + column, extent));
    store(cotangent + column, u, extent);
    if (dgate.data) dgate(column, d * factor * x_hat * a.slope, extent);
    sums[0] = fma(u * factor, x_hat, sums[0]);
  });
  const Vec minus_mean = broadcast(-total.mean(0, 0));
  for_each_vector(b.cols, [&](int64_t column, auto extent) {
    const Vec u = load(cotangent + column, extent), x_hat = stats.x_hat(load(x + column, extent));
    if (dx.data) dx(column, fma(x_hat, minus_mean, u * scale(column, extent)) * stats.rstd, extent);
    if (dscale) store(dscale + column, fma(u, x_hat, load(dscale + column, extent)), extent);
  });
}

// dscale is of all heads.
void gated_backward(const Backward& b, int64_t begin, int64_t end, float* dscale, int64_t traffic) {
  float kept[2][kGatedCols];
  with_gate(b.x.dtype, b.gate.activation, [&](auto x, auto a) {
    using X = decltype(x);
    using A = decltype(a);
    for (int64_t row = begin; row < end; ++row) {
      float* const of_head = dscale ? dscale + weights_of(b.weight_rows, row, b.cols) : nullptr;
      if (b.gate.first) {
        backward_of_gated_first<X, A>(b, row, of_head, traffic, kept[0], kept[1]);
      } else {
        backward_of_gated_last<X, A>(b, row, of_head, traffic, kept[0]);
      }
    }
  });
  fence();
}

}  // namespace
}  // namespace jaxnorm::cpu
