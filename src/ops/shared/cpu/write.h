// An epilogue: writes rows of y.
#pragma once

#include "engine/cpu/columns.h"

namespace jaxnorm::cpu {
namespace {

// y = x_hat * scale + bias, and zeros after each row where its rows are further apart.
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

}  // namespace
}  // namespace jaxnorm::cpu
