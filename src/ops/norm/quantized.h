// The norm with a result of 8 bits, of x or of a sum: y as of `Quantization`. Where it is wanted, y is written as well,
// rounded.
#pragma once

#include "ops/norm/call.h"
#include "ops/shared/quantization.h"

namespace jaxnorm {

struct QuantizedNormForward : NormOperands, AddFirst {
  Quantization quantized;
  Output y;  // null where it is not wanted
};

struct ScaledAddQuantizedNormForward : QuantizedNormForward {
  Input branch_scale;  // as of ScaledAddNormForward, with rows of its own
  RowMap branch_rows;
};

inline Addition addition_of(const ScaledAddQuantizedNormForward& p) {
  return {p.x, p.addend, p.sum, p.branch_scale, p.branch_rows};
}

// The two ops that do the same, where no kernel has all of it.
inline NormForward norm_of(const QuantizedNormForward& p) {
  NormForward norm{};
  static_cast<NormOperands&>(norm) = p;
  norm.mean = norm.rstd = nullptr;
  norm.y = p.y;
  norm.y_stride = p.cols;
  norm.multiply_before_cast = true;
  return norm;
}

inline QuantizedNormForward without_y(QuantizedNormForward p) {
  p.y = {};
  return p;
}

}  // namespace jaxnorm
