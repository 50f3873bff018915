// The kernels for one instruction set: compiled once for each, under the name JAXNORM_ISA.
#include "cpu/kernels.h"
#include "cpu/row.h"

namespace jaxnorm::cpu {
namespace {

template <class F>
void with_type(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f32:
      return f(float{});
    case Dtype::f16:
      return f(F16{});
    default:
      return f(BF16{});
  }
}

template <class T>
constexpr Dtype dtype_of = Dtype::f32;
template <>
constexpr Dtype dtype_of<F16> = Dtype::f16;
template <>
constexpr Dtype dtype_of<BF16> = Dtype::bf16;

// Calls f(X{}, Y{}) with the types that stand for a supported pair of dtypes.
template <class F>
void with_types(Dtype x, Dtype y, F f) {
  with_type(x, [&](auto x_type) {
    using X = decltype(x_type);
    with_type(y, [&](auto y_type) {
      using Y = decltype(y_type);
      if constexpr (is_supported(dtype_of<X>, dtype_of<Y>)) f(X{}, Y{});
    });
  });
}

void save(const Rms& stats, const Forward& f, int64_t row) { f.rstd[row] = stats.rstd; }
void save(const Layer& stats, const Forward& f, int64_t row) {
  f.mean[row] = stats.mean;
  f.rstd[row] = stats.rstd;
}

template <class Stats, class X, class Y>
void forward_row(const Forward& f, int64_t row) {
  const Row<const X> x{static_cast<const X*>(f.x.data) + row * f.cols};
  Y* const y = static_cast<Y*>(f.y.data) + row * f.cols;
  const Weight scale{f.scale, f.scale_offset}, bias{f.bias, -0.f};
  const bool has_scale{f.scale}, has_bias{f.bias}, round_x_hat = !f.multiply_before_cast;
  const Stats stats = Stats::of(x, f.cols, f.epsilon);
  if (f.rstd) save(stats, f, row);
  for_each_vector(f.cols, [&](int64_t column, auto extent) {
    Vec value = stats.x_hat(x(column, extent));
    if (round_x_hat) value = rounded_to(value, Y{});
    if (has_scale && has_bias) {
      value = fma(value, scale(column, extent), bias(column, extent));
    } else if (has_scale) {
      value *= scale(column, extent);
    } else if (has_bias) {
      value += bias(column, extent);
    }
    store(y + column, value, extent);
  });
}

void saved(const Backward& b, int64_t row, Rms* stats) { *stats = {b.rstd[row]}; }
void saved(const Backward& b, int64_t row, Layer* stats) { *stats = {b.mean[row], b.rstd[row], -0.f}; }

template <class Stats, class X, class Dy>
void backward_row(const Backward& b, int64_t row, float* dscale, float* dbias) {
  const Row<const X> x{static_cast<const X*>(b.x.data) + row * b.cols};
  const Row<const Dy> dy{static_cast<const Dy*>(b.dy.data) + row * b.cols};
  const Weight scale{b.scale, b.scale_offset};
  Stats stats;
  saved(b, row, &stats);
  const auto weighted = [&](Vec value, int64_t column, auto extent) {
    return b.scale ? value * scale(column, extent) : value;
  };

  float mean_g = 0, mean_gx = 0;
  if (b.dx) {
    const auto total = sum<2>(b.cols, [&](int64_t column, auto extent, Vec* sums) {
      const Vec g = weighted(dy(column, extent), column, extent);
      if (Stats::centred) sums[0] += g;
      sums[1] = fma(g, stats.x_hat(x(column, extent)), sums[1]);
    });
    mean_g = total.mean(0);
    mean_gx = total.mean(1);
  }
  X* const dx = static_cast<X*>(b.dx.data) + (b.dx ? row * b.cols : 0);
  for_each_vector(b.cols, [&](int64_t column, auto extent) {
    const Vec d = dy(column, extent);
    const Vec x_hat = stats.x_hat(x(column, extent));
    if (b.dx) {
      Vec g = weighted(d, column, extent);
      if (Stats::centred) g -= mean_g;
      store(dx + column, fma(x_hat, broadcast(-mean_gx), g) * stats.rstd, extent);
    }
    if (dscale) store(dscale + column, fma(d, x_hat, load(dscale + column, extent)), extent);
    if (dbias) store(dbias + column, d + load(dbias + column, extent), extent);
  });
}

void forward(const Forward& f, int64_t begin, int64_t end) {
  with_types(f.x.dtype, f.y.dtype, [&](auto x, auto y) {
    const auto row =
        f.kind == Kind::rms ? forward_row<Rms, decltype(x), decltype(y)> : forward_row<Layer, decltype(x), decltype(y)>;
    for (int64_t r = begin; r < end; ++r) row(f, r);
  });
}

void backward(const Backward& b, int64_t begin, int64_t end, float* dscale, float* dbias) {
  with_types(b.x.dtype, b.dy.dtype, [&](auto x, auto dy) {
    const auto row = b.kind == Kind::rms ? backward_row<Rms, decltype(x), decltype(dy)>
                                         : backward_row<Layer, decltype(x), decltype(dy)>;
    for (int64_t r = begin; r < end; ++r) row(b, r, dscale, dbias);
  });
}

void add(const float* from, float* into, int64_t cols) {
  for_each_vector(cols, [&](int64_t column, auto extent) {
    store(into + column, load(into + column, extent) + load(from + column, extent), extent);
  });
}

void cast(const float* from, Output into, int64_t cols) {
  with_type(into.dtype, [&](auto type) {
    auto* const out = static_cast<decltype(type)*>(into.data);
    for_each_vector(cols,
                    [&](int64_t column, auto extent) { store(out + column, load(from + column, extent), extent); });
  });
}

}  // namespace

extern const Kernels JAXNORM_ISA = {JAXNORM_ISA_NAME, forward, backward, add, cast};

}  // namespace jaxnorm::cpu
