// The readers of gated activations. x has the shape (..., 2, columns), or is the gate alone.
#pragma once

#include "ffi/table.h"
#include "ops/gated_activation/call.h"
#include "ops/shared/read.h"

namespace jaxnorm {

// The shape of y, whose rows are read, and whether x has gate and up.
struct GatedRows : GatedShape {
  Shape x, y;
  bool packed;

  // The array of the same dtype in which up, or its gradient, follows the gate's in each row.
  template <class Array>
  Array behind(Array gate) const {
    gate.data = (char*)gate.data + cols * size_of(gate.dtype);
    return gate;
  }
};

// The operand x has this index.
inline GatedRows read_gated_shape(Reader& in, size_t index, bool packed) {
  const RowShapes shapes = in.rows(packed ? 2 : 1, index);
  GatedRows rows{{shapes.rows, shapes.cols, shapes.cols}, shapes.x, shapes.x, packed};
  if (packed && rows.x.size() >= 2) {
    in.require(rows.x.end()[-2] == 2, "the last axis but one of x is not 2 long");
    rows.y.erase(rows.y.end() - 2);
    rows.cols /= 2;
  }
  return rows;
}

inline Activation read_gated_activation(Reader& in) {
  return read_activation(
      in, {Activation::silu, Activation::sigmoid, Activation::relu2, Activation::gelu, Activation::gelu_exact});
}

// Of two arrays, which have no rows of their own: one long row.
inline void join_rows(const GatedRows& rows, GatedShape& p) {
  if (!rows.packed) p = {1, rows.rows * rows.cols, rows.rows * rows.cols};
}

// x, and what it gates.
template <class Op>
void read_gate_and_up(Reader& in, const GatedRows& rows, std::optional<Dtype> dtype, Op& p) {
  static_cast<GatedShape&>(p) = rows;
  p.gate = in.operand("x", rows.x, dtype);
  p.up = rows.packed ? rows.behind(p.gate) : in.operand("up", rows.x, p.gate.dtype);
}

inline GatedActivationForward read_gated_activation_forward(Reader& in) {
  const GatedRows rows = read_gated_shape(in, 0, !in.flag("has_up"));
  GatedActivationForward p{};
  p.activation = read_gated_activation(in);
  read_gate_and_up(in, rows, std::nullopt, p);
  p.y = in.result("y", rows.y, p.gate.dtype);
  join_rows(rows, p);
  return p;
}

inline GatedActivationBackward read_gated_activation_backward(Reader& in) {
  const GatedRows rows = read_gated_shape(in, 1, !in.flag("has_up"));
  const bool with_dx = in.flag("with_dx"), with_dup = in.flag("with_dup");
  GatedActivationBackward p{};
  p.activation = read_gated_activation(in);
  p.dy = in.operand("dy", rows.y);
  read_gate_and_up(in, rows, p.dy.dtype, p);
  in.require(with_dx || with_dup, "no gradient is wanted");
  in.require(!(rows.packed && with_dup), "dup is wanted and x has both");
  if (with_dx) p.dgate = in.result("dx", rows.x, p.dy.dtype);
  if (with_dup) p.dup = in.result("dup", rows.x, p.dy.dtype);
  if (rows.packed) p.dup = rows.behind(p.dgate);
  join_rows(rows, p);
  return p;
}

inline GatedActivationQuantizedForward read_gated_activation_quantized(Reader& in) {
  const GatedRows rows = read_gated_shape(in, 0, !in.flag("has_up"));
  GatedActivationQuantizedForward p{};
  p.activation = read_gated_activation(in);
  read_gate_and_up(in, rows, std::nullopt, p);
  RowShapes of_y;
  of_y.x = of_y.statistics = rows.y;
  of_y.axes = 1;
  of_y.rows = rows.rows;
  of_y.cols = rows.cols;
  if (!rows.y.empty()) of_y.weight = {of_y.statistics.back()}, of_y.statistics.back() = 1;
  read_quantization(in, of_y, p.quantized);
  in.require(!p.quantized.smooth, "there are smooth factors, which no kernel of gates takes");
  return p;
}

namespace ops::gated_activation {

template <class Platform>
inline constexpr std::tuple kTable{
    Row{"jaxnorm_gated_activation_fwd", read_gated_activation_forward},
    Row{"jaxnorm_gated_activation_quantized_fwd", read_gated_activation_quantized},
    Row{"jaxnorm_gated_activation_bwd", read_gated_activation_backward},
    Limit{"groups", kGroups},
    Limit{"smallest_scale", kSmallestScale},
};

}  // namespace ops::gated_activation

}  // namespace jaxnorm
