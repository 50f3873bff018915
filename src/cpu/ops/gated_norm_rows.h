// The rows of gated RMSNorm.
//
// The activation is computed once each way, in the pass that reads the gate from memory; what later passes want of it
// is kept as float32 in rows that stay in the cache.
#pragma once

#include "cpu/ops/activation.h"
#include "cpu/ops/norm_rows.h"
#include "ops/gated_norm.h"

namespace jaxnorm::cpu {
namespace {

// A load functor: the products of rows and their activations, for which there is room in `products`.
template <class X, class A>
struct Products {
  InputRows<X> x, gate;
  int64_t cols;
  float* products;

  int64_t ahead(int64_t, int64_t) const { return 0; }

  template <int R>
  Rows<R, float> rows(int64_t first, int64_t count) const {
    const X *const x_row = x[first], *const gate_row = gate[first];
    float* const out = products;
    for_each_vector(count * cols, [&](int64_t i, auto extent) {
      store(out + i, load(x_row + i, extent) * A::of(load(gate_row + i, extent)), extent);
    });
    return Rows<R, float>(products, cols, 0, count);
  }
};

// An epilogue: writes y where it is multiplied by the activations.
template <class X, class A>
struct WriteGated {
  Input scale;
  RowMap weight_rows;
  int64_t cols;
  InputRows<X> gate;
  OutputRows<X> y;

  template <class Stats>
  void operator()(int64_t row, Stats stats, RowReader<X> x) const {
    const Affine affine(scale, {}, weights_of(weight_rows, row, cols));
    const RowReader<X> gate_row{gate[row], x.ahead};
    const RowWriter<X> y_row = y[row];
    for_each_vector(cols, [&](int64_t column, auto extent) {
      const Vec a = A::of(gate_row(column, extent));
      y_row(column, affine(stats.x_hat(x(column, extent)), column, extent) * a, extent);
    });
  }
};

static_assert(kTogether * kShort <= kGatedCols);

// Calls f(X{}, A{}) with the types that stand for the dtype of all rows and for the activation.
template <class F>
void with_activation(Dtype dtype, Activation activation, F f) {
  with_type(dtype, [&](auto x) { activation == Activation::silu ? f(x, Silu{}) : f(x, Sigmoid{}); });
}

void gated_norm(const GatedNormForward& p, int64_t begin, int64_t end, int64_t traffic) {
  float products[kGatedCols];
  with_activation(p.x.dtype, p.gate.activation, [&](auto x_type, auto a) {
    using X = decltype(x_type);
    const InputRows<X> x(p.x, p.cols), gate(p.gate.data, p.cols);
    const OutputRows<X> y(p.y, p.cols, traffic);
    if (p.gate.first) {
      const Products<X, decltype(a)> load{x, gate, p.cols, products};
      for_rows<Rms>(p, begin, end, traffic, load, Write<X>{p.scale, {}, p.weight_rows, p.cols, y, false});
    } else {
      const WriteGated<X, decltype(a)> write{p.scale, p.weight_rows, p.cols, gate, y};
      for_rows<Rms>(p, begin, end, traffic, Stored<X>{p.x, p.cols}, write);
    }
  });
}

// The cotangents of a row that was multiplied by its activations and then normalised. There is room for a row of the
// activations and one of their slopes.
template <class X, class A>
struct GateFirst {
  const X *dy, *x, *gate;
  RowWriter<X> dx, dgate;
  float *values, *slopes;

  struct In {
    Vec d, h, x, a;
  };

  template <class Extent>
  Cotangents first(int64_t column, Extent extent) const {
    const Activated a = A::with_slope(load(gate + column, extent));
    store(values + column, a.value, extent);
    store(slopes + column, a.slope, extent);
    return {load(dy + column, extent), load(x + column, extent) * a.value};
  }

  template <class Extent>
  In last(int64_t column, Extent extent) const {
    const Vec d = load(dy + column, extent), v = load(x + column, extent), a = load(values + column, extent);
    return {d, v * a, v, a};
  }

  bool needs_sums() const { return true; }
  bool is_wanted() const { return dx || dgate; }

  template <class Extent>
  void before_sums(int64_t, const Cotangents&, Vec, Vec, Extent) const {}

  template <class Extent>
  void write(int64_t column, const In& in, Vec dh, Extent extent) const {
    if (dx) dx(column, dh * in.a, extent);
    if (dgate) dgate(column, dh * in.x * load(slopes + column, extent), extent);
  }
};

// Those of a row that was normalised and then multiplied by its activations. There is room for a row of the cotangent
// of what was multiplied by them.
template <class X, class A>
struct GateLast {
  const X *dy, *x, *gate;
  RowWriter<X> dx, dgate;
  float* cotangents;

  struct In {
    Vec d, h, dy, slope;
  };

  template <class Extent>
  In first(int64_t column, Extent extent) const {
    const Activated a = A::with_slope(load(gate + column, extent));
    const Vec dy_vec = load(dy + column, extent), d = dy_vec * a.value;
    store(cotangents + column, d, extent);
    return {d, load(x + column, extent), dy_vec, a.slope};
  }

  template <class Extent>
  Cotangents last(int64_t column, Extent extent) const {
    return {load(cotangents + column, extent), load(x + column, extent)};
  }

  bool needs_sums() const { return true; }
  bool is_wanted() const { return bool{dx}; }

  template <class Extent>
  void before_sums(int64_t column, const In& in, Vec scale, Vec x_hat, Extent extent) const {
    if (dgate) dgate(column, in.dy * scale * x_hat * in.slope, extent);
  }

  template <class Extent>
  void write(int64_t column, const Cotangents&, Vec dh, Extent extent) const {
    dx(column, dh, extent);
  }
};

void gated_norm_grad(const GatedNormBackward& p, int64_t begin, int64_t end, float* dscale, int64_t traffic) {
  float kept[2][kGatedCols];
  with_activation(p.x.dtype, p.gate.activation, [&](auto x_type, auto a) {
    using X = decltype(x_type);
    using A = decltype(a);
    const InputRows<X> dy(p.dy, p.cols), x(p.x, p.cols), gate(p.gate.data, p.cols);
    const OutputRows<X> dx(p.dx, p.cols, traffic), dgate(p.dgate, p.cols, traffic);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = weights_of(p.weight_rows, row, p.cols);
      const auto write = [&](const auto& of_row) {
        grad_row(p.cols, Rms::saved(p, row), of_row, of_row, Weight(p.scale, 1, at), WeightSums{dscale}.from(at));
      };
      if (p.gate.first) {
        write(GateFirst<X, A>{dy[row], x[row], gate[row], dx[row], dgate[row], kept[0], kept[1]});
      } else {
        write(GateLast<X, A>{dy[row], x[row], gate[row], dx[row], dgate[row], kept[0]});
      }
    }
  });
  fence();
}

}  // namespace
}  // namespace jaxnorm::cpu
