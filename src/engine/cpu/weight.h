// Scale and bias, which are f32 here with the offset of scale in it.
#pragma once

#include "engine/cpu/vector.h"
#include "operands.h"

namespace jaxnorm::cpu {
namespace {

// The first element of the row of weights for a row of x. The plain case divides nothing.
int64_t weights_of(RowMap weight_rows, int64_t row, int64_t cols) {
  return weight_rows.count == 1 ? 0 : row / weight_rows.inner % weight_rows.count * cols;
}

// A row of weights. An absent one is the constant that changes no bit.
struct Weight {
  const float* data;
  float absent;

  Weight(Input weight, float absent, int64_t begin = 0)
      : data(weight ? static_cast<const float*>(weight.data) + begin : nullptr), absent(absent) {}

  template <class Extent>
  Vec operator()(int64_t column, Extent extent) const {
    return data ? load(data + column, extent) : broadcast(absent);
  }
};

// x_hat * scale + bias
struct Affine {
  Weight scale, bias;

  Affine(Input scale, Input bias, int64_t begin = 0) : scale(scale, 1, begin), bias(bias, -0.f, begin) {}

  template <class Extent>
  Vec operator()(Vec x_hat, int64_t column, Extent extent) const {
    return fma(x_hat, scale(column, extent), bias(column, extent));
  }
};

}  // namespace
}  // namespace jaxnorm::cpu
