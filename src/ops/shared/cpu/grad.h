// The operands and the result of a backward without anything between its rows and x_hat, and the weights of its rows.
#pragma once

#include "engine/cpu/row_loop.h"

namespace jaxnorm::cpu {
namespace {

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
