// The rows of the norms that are no other op's too (norm_rows.h), quantised and gated; and the launches of all.
#include "engine/cpu/launch.h"
#include "ops/norm/cpu/norm_rows.h"
#include "ops/shared/cpu/functions.h"
#include "ops/shared/cpu/quantize.h"

namespace jaxnorm::cpu {

// In the ops that these are given, scale, bias and smooth are f32 and the scale has its offset in it: F32Weight makes
// them so. They work on rows [begin, end); `traffic` is how many bytes all rows of the call read and write. Gradients
// of weights are added to f32 sums of the weights' shape; null: they are not wanted. `products`, `y` and `kept` are
// room for rows.
struct NormKernels {
  static const NormKernels baseline, avx2, avx512;

  // With an addition, which is then done first, p.x is its sum.
  void (*norm)(const NormForward& p, const Addition* addition, int64_t begin, int64_t end, int64_t traffic);
  void (*quantized_norm)(const QuantizedNormForward& p, const Addition* addition, int64_t begin, int64_t end,
                         int64_t traffic);
  void (*gated_norm)(const GatedNormForward& p, int64_t begin, int64_t end, float* products, int64_t traffic);
  void (*gated_quantized_norm)(const GatedNormQuantizedForward& p, int64_t begin, int64_t end, float* products,
                               float* y, int64_t traffic);
  void (*norm_grad)(const NormBackward& p, int64_t begin, int64_t end, float* dscale, float* dbias, int64_t traffic);
  void (*gated_norm_grad)(const GatedNormBackward& p, int64_t begin, int64_t end, float* dscale, float* kept,
                          int64_t traffic);
};

namespace {

// A row of y as it is, rounded.
template <class Stats, class X>
void write_y(const QuantizedNormForward& p, int64_t row, Stats stats, RowReader<X> x, int64_t traffic) {
  with_type(p.y.dtype, [&](auto y) {
    const OutputRows<decltype(y)> y_rows(p.y, p.cols, traffic);
    Write<decltype(y)>{p.cols, y_rows, p.scale, p.bias}(row, stats, x);
  });
}

// An epilogue: writes y quantised, after y itself where that is wanted.
template <class Q>
struct WriteQuantized {
  const QuantizedNormForward& p;
  Affine affine;
  Weight smooth;
  int64_t traffic;

  template <class Stats, class X>
  void operator()(int64_t row, Stats stats, RowReader<X> x) const {
    if (p.y) write_y(p, row, stats, RowReader<X>{x.data, 0}, traffic);
    const auto values = [&](RowReader<X> x) {
      return [x, stats, affine = affine, smooth = smooth](int64_t column, auto extent) {
        return affine(stats.x_hat(x(column, extent)), column, extent) * smooth(column, extent);
      };
    };
    for (int64_t begin = 0; begin < p.cols; begin += p.quantized.group) {
      quantize(p.quantized, row, p.cols, begin, values({x.data, 0}), values(x), Q{});
    }
  }
};

void quantized_norm(const QuantizedNormForward& p, const Addition* addition, int64_t begin, int64_t end,
                    int64_t traffic) {
  const Affine affine(p.scale, p.bias);
  const Weight smooth(p.quantized.smooth, 1);
  with_stats(p.kind, [&](auto stats) {
    with_type(p.x.dtype, [&](auto x) {
      with_quantized_type(p.quantized.values.dtype, [&](auto q) {
        const Stored<decltype(x)> load{p.x, p.cols, addition};
        const WriteQuantized<decltype(q)> write{p, affine, smooth, traffic};
        for_rows<decltype(stats)>(p, begin, end, traffic, load, write);
      });
    });
  });
}

// The rows of gated RMSNorm. The activation is computed once each way, in the pass that reads the gate from memory;
// what later passes want of it is kept as float32 in rows that stay in the cache.

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

// Gated and quantised: y is kept as float32 in a row that stays in the cache, or each pass of the quantisation would
// compute the activation again.
void quantize_row(const GatedNormQuantizedForward& p, int64_t row, const float* y) {
  const Weight smooth(p.quantized.smooth, 1, weights_of(p.weight_rows, row, p.cols));
  const auto v = [&](int64_t column, auto extent) { return load(y + column, extent) * smooth(column, extent); };
  with_quantized_type(p.quantized.values.dtype, [&](auto q) {
    for (int64_t begin = 0; begin < p.cols; begin += p.quantized.group)
      quantize(p.quantized, row, p.cols, begin, v, v, q);
  });
}

// An epilogue: a row of y as another epilogue writes it to `y`, quantised.
template <class Write>
struct QuantizeWritten {
  const GatedNormQuantizedForward& p;
  Write write;
  const float* y;

  template <class Stats, class X>
  void operator()(int64_t row, Stats stats, RowReader<X> x) const {
    write(row, stats, x);
    quantize_row(p, row, y);
  }
};

void gated_quantized_norm(const GatedNormQuantizedForward& p, int64_t begin, int64_t end, float* products, float* y,
                          int64_t traffic) {
  const auto rows_of_y = [&](auto) { return OutputRows<float>({y, Dtype::f32}, 0, 0); };
  for_gated_rows(p, begin, end, products, traffic, rows_of_y,
                 [&](auto write) { return QuantizeWritten<decltype(write)>{p, write, y}; });
}

}  // namespace

const NormKernels NormKernels::JAXNORM_ISA = {
    cpu::norm, cpu::quantized_norm, cpu::gated_norm, cpu::gated_quantized_norm, cpu::norm_grad, cpu::gated_norm_grad};

#ifdef JAXNORM_ONCE
namespace {

// Calls task(begin, end) for all rows of a forward `p` whose weights `p` has as the kernels want them meanwhile.
template <class Task>
void for_each_forward_rows(NormOperands& p, const ParallelFor& parallel_for, Task task) {
  const int64_t weights = p.weight_rows.count * p.cols;
  const F32Weight scale(&p.scale, p.scale_offset, weights, parallel_for), bias(&p.bias, 0, weights, parallel_for);
  for_each_rows(parallel_for, p.rows, p.cols, task);
}

void forward(NormForward p, const Addition* addition, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, x_size = size_of(p.x.dtype);
  const int64_t traffic =
      elements * (size_of(p.y.dtype) + (addition ? size_of(addition->a.dtype) + 2 * x_size : x_size));
  expect_writes(p.y, p.rows * p.y_stride);
  if (addition) expect_writes(addition->sum, elements);
  for_each_forward_rows(p, parallel_for, [&](int64_t begin, int64_t end) {
    kernels<NormKernels>().norm(p, addition, begin, end, traffic);
  });
}

}  // namespace

void run(const NormForward& p, const ParallelFor& parallel_for) { forward(p, nullptr, parallel_for); }

void run(const ScaledAddNormForward& call, const ParallelFor& parallel_for) {
  if (!call.addend) return run(static_cast<const NormForward&>(call), parallel_for);
  const ScaledAddNormForward p = with_sum_somewhere(call);
  Addition addition = addition_of(p);
  const F32Weight factor(&addition.factor, -0.0f, p.weight_rows.count * p.cols, parallel_for);
  forward(of_sum<AddNormForward>(p), &addition, parallel_for);
}

void run(const ScaledAddQuantizedNormForward& call, const ParallelFor& parallel_for) {
  ScaledAddQuantizedNormForward p = call;
  Addition addition = addition_of(p);
  const F32Weight factor(&addition.factor, -0.0f, p.branch_rows.count * p.cols, parallel_for);
  const int64_t elements = p.rows * p.cols, sum_size = p.sum ? size_of(p.sum.dtype) : 0;
  const int64_t y_size = p.y ? size_of(p.y.dtype) : 0;
  const int64_t traffic = elements * (size_of(p.x.dtype) + 2 * sum_size + size_of(p.quantized.values.dtype) + y_size);
  if (p.sum) p.x = {p.sum.data, p.sum.dtype};
  const F32Weight smooth(&p.quantized.smooth, 0, p.cols, parallel_for);
  expect_writes(p.quantized.values, elements);
  expect_writes(p.y, elements);
  expect_writes(p.sum, elements);
  for_each_forward_rows(p, parallel_for, [&](int64_t begin, int64_t end) {
    kernels<NormKernels>().quantized_norm(p, p.sum ? &addition : nullptr, begin, end, traffic);
  });
}

void run(const NormBackward& call, const ParallelFor& parallel_for) {
  NormBackward p = call;
  const F32Weight scale(&p.scale, p.scale_offset, p.weight_rows.count * p.cols, parallel_for);
  const int64_t elements = p.rows * p.cols, x_arrays = p.dsum ? 3 : 2;
  const int64_t traffic = elements * (x_arrays * size_of(p.x.dtype) + size_of(p.dy.dtype));
  expect_writes(p.dx, elements);
  for_each_grad_rows(parallel_for, p, p.dscale, p.dbias, 0,
                     [&](int64_t begin, int64_t end, float* dscale, float* dbias, float*) {
                       kernels<NormKernels>().norm_grad(p, begin, end, dscale, dbias, traffic);
                     });
}

void run(const GatedNormForward& call, const ParallelFor& parallel_for) {
  GatedNormForward p = call;
  const F32Weight scale(&p.scale, p.scale_offset, p.weight_rows.count * p.cols, parallel_for);
  const int64_t elements = p.rows * p.cols, traffic = elements * 3 * size_of(p.x.dtype);
  expect_writes(p.y, elements);
  for_each_rows_with_room(parallel_for, p.rows, p.cols, floats_of_rows(p.cols),
                          [&](int64_t begin, int64_t end, float* products) {
                            kernels<NormKernels>().gated_norm(p, begin, end, products, traffic);
                          });
}

void run(const GatedNormBackward& call, const ParallelFor& parallel_for) {
  GatedNormBackward p = call;
  const F32Weight scale(&p.scale, p.scale_offset, p.weight_rows.count * p.cols, parallel_for);
  const int64_t elements = p.rows * p.cols, traffic = elements * 5 * size_of(p.x.dtype);
  expect_writes(p.dx, elements);
  expect_writes(p.dgate, elements);
  for_each_grad_rows(parallel_for, p, p.dscale, {}, 2 * p.cols,
                     [&](int64_t begin, int64_t end, float* dscale, float*, float* kept) {
                       kernels<NormKernels>().gated_norm_grad(p, begin, end, dscale, kept, traffic);
                     });
}

void run(const GatedNormQuantizedForward& call, const ParallelFor& parallel_for) {
  GatedNormQuantizedForward p = call;
  const int64_t elements = p.rows * p.cols, weights = p.weight_rows.count * p.cols;
  const F32Weight scale(&p.scale, p.scale_offset, weights, parallel_for);
  const F32Weight smooth(&p.quantized.smooth, 0, weights, parallel_for);
  const int64_t traffic = elements * (2 * size_of(p.x.dtype) + size_of(p.quantized.values.dtype));
  expect_writes(p.quantized.values, elements);
  const int64_t products = floats_of_rows(p.cols);
  for_each_rows_with_room(parallel_for, p.rows, p.cols, products + p.cols,
                          [&](int64_t begin, int64_t end, float* room) {
                            kernels<NormKernels>().gated_quantized_norm(p, begin, end, room, room + products, traffic);
                          });
}
#endif

}  // namespace jaxnorm::cpu
