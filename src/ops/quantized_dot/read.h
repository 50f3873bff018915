// The reader of the product of matrices of 8-bit floats.
#pragma once

#include <initializer_list>
#include <string>

#include "ffi/table.h"
#include "ops/quantized_dot/call.h"

namespace jaxnorm {

inline void check_multiple(Reader& in, const char* name, int64_t extent) {
  if (extent % kDotMultiple == 0) return;
  in.fail(std::string(name) + " is " + std::to_string(extent) + ", expected a multiple of " +
          std::to_string(kDotMultiple));
}

// The rows of x, whose last axis is summed over.
inline RowShapes read_summed_rows(Reader& in) {
  const Shape x = in.operand_shape("x", 0);
  in.require(x.empty() || x.back() > 0, "depth, the last axis of x, is 0");
  return in.rows(1);
}

inline QuantizedDot read_quantized_dot(Reader& in) {
  const RowShapes rows = read_summed_rows(in);
  QuantizedDot p{};
  p.fast_accumulation = in.flag("fast_accumulation");
  p.rows = rows.rows;
  p.depth = rows.cols;
  p.x = in.float8_operand("x", rows.x);
  p.x_scales = in.f32_operand("x_scales", rows.statistics);
  const Shape weights = in.next_operand_shape();
  p.cols = weights.size() == 2 ? weights[0] : 0;
  in.require(weights.empty() || weights.size() == 2, "weights are not of the shape (cols, depth)");
  p.weights = in.float8_operand("weights", {p.cols, p.depth});
  p.weight_scales = in.f32_operand("weight_scales", {p.cols, 1});
  Shape y = rows.x;
  if (!y.empty()) y.back() = p.cols;
  p.y = in.result("y", y);
  if (in.flag("has_bias")) {
    in.require(p.y.dtype != Dtype::f32, "there is a bias and y is F32, expected F16 or BF16");
    p.bias = in.operand("bias", {p.cols}, p.y.dtype);
  }
  p.workspace = in.workspace();
  in.require(p.x.dtype != Dtype::f8e5m2 || p.weights.dtype != Dtype::f8e5m2,
             "x and weights are both F8E5M2, expected F8E4M3FN of one of them");
  check_multiple(in, "depth", p.depth);
  check_multiple(in, "the number of columns of y", p.cols);
  return p;
}

namespace ops::quantized_dot {

template <class Platform>
inline constexpr std::tuple kTable{
    CudaRow{"jaxnorm_quantized_dot", read_quantized_dot, Platform::workspace(cuda::quantized_dot_workspace)},
};

}  // namespace ops::quantized_dot

}  // namespace jaxnorm
