// The rows of gated RMSNorm.
//
// The activation is computed once each way, in the pass that reads the gate from memory; what later passes want of it
// is kept as float32 in rows that stay in the cache.
#pragma once

#include "ops/norm/cpu/norm_rows.h"
#include "ops/norm/gated.h"
#include "ops/shared/cpu/functions.h"

namespace jaxnorm::cpu {
namespace {

// A load functor: the products of rows and their activations, for which there is room in `products`.
template <class X, class A>
struct Products {
  InputRows<X> x, gate;
  int64_t cols;
  float* products;

  int64_t ahead(int64_t, int64_t) const { return 0; }

  // A function of its own: the constants of the activation would stay in registers that the sums want.
  template <int R>
  [[gnu::noinline]] Rows<R, float> rows(int64_t first, int64_t count) const {
    const X *const x_row = x[first], *const gate_row = gate[first];
    float* const out = products;
    for_each_vector(count * cols, [&](int64_t i, auto extent) {
      store(out + i, load(x_row + i, extent) * A::of(load(gate_row + i, extent)), extent);
    });
    return Rows<R, float>(products, cols, 0, count);
  }
};

// An epilogue: writes y where it is multiplied by the activations.
template <class X, class A, class Y = X>
struct WriteGated {
  Input scale;
  RowMap weight_rows;
  int64_t cols;
  InputRows<X> gate;
  OutputRows<Y> y;

  template <class Stats>
  void operator()(int64_t row, Stats stats, RowReader<X> x) const {
    const Affine affine(scale, {}, weights_of(weight_rows, row, cols));
    const RowReader<X> gate_row{gate[row], x.ahead};
    const RowWriter<Y> y_row = y[row];
    for_each_vector(cols, [&](int64_t column, auto extent) {
      const Vec a = A::of(gate_row(column, extent));
      y_row(column, affine(stats.x_hat(x(column, extent)), column, extent) * a, extent);
    });
  }
};

static_assert(kTogether * kShort <= kShortFloats);

// Calls f(X{}, A{}) with the types that stand for the dtype of all rows and for the activation.
template <class F>
void with_activation(Dtype dtype, Activation activation, F f) {
  with_type(dtype, [&](auto x) { with_one_of<Silu, Sigmoid>(activation, [&](auto a) { f(x, a); }); });
}

// Loops over rows of an op, with room for products and with y as what writes it: y(X{}) gives the rows that it is
// written to, and with(write) the epilogue around the one that writes it.
template <class P, class MakeY, class F>
void for_gated_rows(const P& p, int64_t begin, int64_t end, float* products, int64_t traffic, MakeY make_y, F with) {
  with_activation(p.x.dtype, p.gate.activation, [&](auto x_type, auto a) {
    using X = decltype(x_type);
    const InputRows<X> x(p.x, p.cols), gate(p.gate.data, p.cols);
    const auto y = make_y(x_type);
    using Y = typename decltype(y)::Element;
    if (p.gate.first) {
      const Products<X, decltype(a)> load{x, gate, p.cols, products};
      for_rows<Rms>(p, begin, end, traffic, load, with(Write<Y>{p.cols, y, p.scale, {}, p.weight_rows}));
    } else {
      const WriteGated<X, decltype(a), Y> write{p.scale, p.weight_rows, p.cols, gate, y};
      for_rows<Rms>(p, begin, end, traffic, Stored<X>{p.x, p.cols}, with(write));
    }
  });
}

void gated_norm(const GatedNormForward& p, int64_t begin, int64_t end, float* products, int64_t traffic) {
  const auto y = [&](auto x) { return OutputRows<decltype(x)>(p.y, p.cols, traffic); };
  for_gated_rows(p, begin, end, products, traffic, y, [](auto write) { return write; });
}

template <class X>
struct GatedRow {
  const X *dy, *x, *gate;
  RowWriter<X> dx, dgate;
  float *kept, *slopes;  // room for a row each
};

// The cotangents of a row that was multiplied by its activations, which are kept, and then normalised.
template <class X, class A>
struct GateFirst : GatedRow<X> {
  struct In {
    Vec d, h, x, a;
  };

  template <class Extent>
  Cotangents first(int64_t column, Extent extent) const {
    const Activated a = A::with_slope(load(this->gate + column, extent));
    store(this->kept + column, a.value, extent);
    store(this->slopes + column, a.slope, extent);
    return {load(this->dy + column, extent), load(this->x + column, extent) * a.value};
  }

  template <class Extent>
  In last(int64_t column, Extent extent) const {
    const Vec x = load(this->x + column, extent), a = load(this->kept + column, extent);
    return {load(this->dy + column, extent), x * a, x, a};
  }

  bool needs_sums() const { return true; }
  bool is_wanted() const { return this->dx || this->dgate; }

  template <class Extent>
  void before_sums(int64_t, const Cotangents&, Vec, Vec, Extent) const {}

  template <class Extent>
  void write(int64_t column, const In& in, Vec dh, Extent extent) const {
    if (this->dx) this->dx(column, dh * in.a, extent);
    if (this->dgate) this->dgate(column, dh * in.x * load(this->slopes + column, extent), extent);
  }
};

// Those of a row that was normalised and then multiplied by its activations. The cotangent of what was multiplied by
// them is kept.
template <class X, class A>
struct GateLast : GatedRow<X> {
  struct In {
    Vec d, h, dy, slope;
  };

  template <class Extent>
  In first(int64_t column, Extent extent) const {
    const Activated a = A::with_slope(load(this->gate + column, extent));
    const Vec dy = load(this->dy + column, extent), d = dy * a.value;
    store(this->kept + column, d, extent);
    return {d, load(this->x + column, extent), dy, a.slope};
  }

  template <class Extent>
  Cotangents last(int64_t column, Extent extent) const {
    return {load(this->kept + column, extent), load(this->x + column, extent)};
  }

  bool needs_sums() const { return true; }
  bool is_wanted() const { return bool{this->dx}; }

  template <class Extent>
  void before_sums(int64_t column, const In& in, Vec scale, Vec x_hat, Extent extent) const {
    if (this->dgate) this->dgate(column, in.dy * scale * x_hat * in.slope, extent);
  }

  template <class Extent>
  void write(int64_t column, const Cotangents&, Vec dh, Extent extent) const {
    this->dx(column, dh, extent);
  }
};

// `Row` is one of these two, which are operands and result in one.
template <class X, class Row>
struct GatedNormGrad {
  const GatedNormBackward& p;
  InputRows<X> dy, x, gate;
  OutputRows<X> dx, dgate;
  float *dscale, *kept, *slopes;

  GatedNormGrad(const GatedNormBackward& p, float* dscale, float* kept, int64_t traffic)
      : p(p),
        dy(p.dy, p.cols),
        x(p.x, p.cols),
        gate(p.gate.data, p.cols),
        dx(p.dx, p.cols, traffic),
        dgate(p.dgate, p.cols, traffic),
        dscale(dscale),
        kept(kept),
        slopes(kept + p.cols) {}

  Row operands(int64_t row) const { return {{dy[row], x[row], gate[row], dx[row], dgate[row], kept, slopes}}; }
  Row result(int64_t row) const { return operands(row); }
  GradWeights weights(int64_t row) const { return grad_weights(p, row, dscale, nullptr); }
};

// `kept`: room for two rows.
void gated_norm_grad(const GatedNormBackward& p, int64_t begin, int64_t end, float* dscale, float* kept,
                     int64_t traffic) {
  with_activation(p.x.dtype, p.gate.activation, [&](auto x, auto a) {
    using X = decltype(x);
    using A = decltype(a);
    if (p.gate.first) {
      for_grad_rows<Rms>(p, begin, end, GatedNormGrad<X, GateFirst<X, A>>(p, dscale, kept, traffic));
    } else {
      for_grad_rows<Rms>(p, begin, end, GatedNormGrad<X, GateLast<X, A>>(p, dscale, kept, traffic));
    }
  });
}

}  // namespace
}  // namespace jaxnorm::cpu
