// The rows of RMSNorm and LayerNorm.
#pragma once

#include "cpu/engine/grad_loop.h"
#include "cpu/engine/row_loop.h"
#include "cpu/ops/load.h"
#include "ops/norm.h"

namespace jaxnorm::cpu {
namespace {

// Calls f(Stats{}) with the statistics of a kind.
template <class F>
void with_stats(Kind kind, F f) {
  kind == Kind::rms ? f(Rms{}) : f(Layer{});
}

// An epilogue: writes y, and zeros after each row where its rows are further apart.
template <class Y>
struct Write {
  Input scale, bias;
  RowMap weight_rows;
  int64_t cols;
  OutputRows<Y> y;
  bool round_x_hat;

  template <class Stats, class X>
  void operator()(int64_t row, Stats stats, RowReader<X> x) const {
    const Affine affine(scale, bias, weights_of(weight_rows, row, cols));
    const RowWriter<Y> y_row = y[row];
    const bool round = round_x_hat;
    for_each_vector(cols, [&](int64_t column, auto extent) {
      Vec x_hat = stats.x_hat(x(column, extent));
      if (round) x_hat = rounded_to(x_hat, Y{});
      y_row(column, affine(x_hat, column, extent), extent);
    });
    if (y.stride > cols) memset(y_row.data + cols, 0, (y.stride - cols) * sizeof(Y));
  }
};

void norm(const NormForward& p, const Addition* addition, int64_t begin, int64_t end, int64_t traffic) {
  with_stats(p.kind, [&](auto stats) {
    with_types(p.x.dtype, p.y.dtype, [&](auto x, auto y) {
      using Y = decltype(y);
      const Stored<decltype(x)> load{p.x, p.cols, addition};
      const Write<Y> write{p.scale, p.bias, p.weight_rows, p.cols, {p.y, p.y_stride, traffic}, !p.multiply_before_cast};
      for_rows<decltype(stats)>(p, begin, end, traffic, load, write);
    });
  });
}

struct Cotangents {
  Vec d, h;
};

template <class X, class Dy>
struct NormOperandRows {
  RowReader<Dy> dy;
  RowReader<X> x;

  template <class Extent>
  Cotangents first(int64_t column, Extent extent) const {
    return {load(dy.data + column, extent), load(x.data + column, extent)};
  }
  template <class Extent>
  Cotangents last(int64_t column, Extent extent) const {
    return {dy(column, extent), x(column, extent)};
  }
};

template <class X>
struct NormResult {
  RowWriter<X> dx;
  const X* dsum;

  bool needs_sums() const { return is_wanted(); }
  bool is_wanted() const { return bool{dx}; }

  template <class In, class Extent>
  void before_sums(int64_t, const In&, Vec, Vec, Extent) const {}

  template <class In, class Extent>
  void write(int64_t column, const In&, Vec dh, Extent extent) const {
    if (dsum) dh += load(dsum + column, extent);
    dx(column, dh, extent);
  }
};

void norm_grad(const NormBackward& p, int64_t begin, int64_t end, float* dscale, float* dbias, int64_t traffic) {
  with_stats(p.kind, [&](auto stats_type) {
    with_types(p.x.dtype, p.dy.dtype, [&](auto x_type, auto dy_type) {
      using X = decltype(x_type);
      using Stats = decltype(stats_type);
      const InputRows<X> x(p.x, p.cols, traffic), dsum(p.dsum, p.cols);
      const InputRows<decltype(dy_type)> dy(p.dy, p.dy_stride, traffic);
      const OutputRows<X> dx(p.dx, p.cols, traffic);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = weights_of(p.weight_rows, row, p.cols);
        const NormOperandRows<X, decltype(dy_type)> operands{dy.reader(row), x.reader(row)};
        grad_row(p.cols, Stats::saved(p, row), operands, NormResult<X>{dx[row], dsum[row]}, Weight(p.scale, 1, at),
                 WeightSums{dscale, dbias}.from(at));
      }
    });
  });
  fence();
}

}  // namespace
}  // namespace jaxnorm::cpu
