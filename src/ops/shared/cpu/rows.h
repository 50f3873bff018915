// Rows of a forward, how they are loaded and how those of y are written; and those of a backward without anything
// between them and x_hat.
#pragma once

#include "engine/cpu/columns.h"
#include "engine/cpu/row_loop.h"
#include "engine/cpu/vector.h"
#include "ops/norm/call.h"

namespace jaxnorm::cpu {
namespace {

// Each vector of b is read before that of the sum is written, which may lie there. A factor is f32.
void add_rows(const Addition& p, int64_t cols, int64_t first, int64_t count) {
  with_types(p.a.dtype, p.b.dtype, [&](auto a_type, auto sum_type) {
    using Sum = decltype(sum_type);
    const auto* const a = static_cast<const decltype(a_type)*>(p.a.data) + first * cols;
    const auto* const b = static_cast<const Sum*>(p.b.data) + first * cols;
    auto* const sum = static_cast<Sum*>(p.sum.data) + first * cols;
    const auto* const factor = static_cast<const float*>(p.factor.data);
    if (!factor) {
      for_each_vector(count * cols, [&](int64_t i, auto extent) {
        store(sum + i, load(a + i, extent) + load(b + i, extent), extent);
      });
      return;
    }
    for (int64_t row = 0; row < count; ++row) {
      const float* const of_row = factor + weights_of(p.factor_rows, first + row, cols);
      for_each_vector(cols, [&](int64_t column, auto extent) {
        const int64_t i = row * cols + column;
        store(sum + i, load(of_row + column, extent) * load(a + i, extent) + load(b + i, extent), extent);
      });
    }
  });
}

// A load functor: rows as they lie in memory, which an addition may have to write first.
template <class T>
struct Stored {
  Input x;
  int64_t cols;
  const Addition* addition = nullptr;

  int64_t ahead(int64_t traffic, int64_t elements) const { return elements_ahead(traffic, elements, sizeof(T)); }

  template <int R>
  Rows<R, T> rows(int64_t first, int64_t count) const {
    if (addition) add_rows(*addition, cols, first, count);
    return Rows<R, T>(static_cast<const T*>(x.data), cols, first, count);
  }
};

// An epilogue, which writes rows of y: y = x_hat * scale + bias, and zeros after each row where its rows are further
// apart.
template <class Y>
struct Write {
  int64_t cols;
  OutputRows<Y> y;
  Input scale = {}, bias = {};
  RowMap weight_rows = {};
  bool round_x_hat = false;  // to y's dtype, before the multiplication

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

// The operands of a backward.
struct Cotangents {
  Vec d, h;
};

template <class Dy, class X>
struct DyAndX {
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

// The cotangent of x, to which dsum is added where it came.
template <class X>
struct WriteDx {
  RowWriter<X> dx;
  const X* dsum = nullptr;

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

// The weights of a row of a backward `p`, with sums of the weights' shape.
template <class P>
GradWeights grad_weights(const P& p, int64_t row, float* dscale, float* dbias) {
  const int64_t begin = weights_of(p.weight_rows, row, p.cols);
  return {Weight(p.scale, 1, begin), dscale ? dscale + begin : nullptr, dbias ? dbias + begin : nullptr};
}

}  // namespace
}  // namespace jaxnorm::cpu
