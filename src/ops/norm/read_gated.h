// The readers of gated RMSNorm, whose rows are those of x's last axis.
#pragma once

#include <algorithm>
#include <string>

#include "ffi/reader.h"
#include "ops/norm/gated.h"
#include "ops/shared/read.h"

namespace jaxnorm {

// The shapes of x, the operand of this index. `grouped`: scale has x's last two axes, and neighbouring rows are the
// groups of a longer one.
inline RowShapes read_gated_rows(Reader& in, size_t x_index) {
  RowShapes rows = in.rows(1, x_index);
  if (rows.cols > kGatedCols) {
    in.fail("rows are of " + std::to_string(rows.cols) + " elements, expected at most " + std::to_string(kGatedCols));
  }
  if (!in.flag("grouped")) return rows;
  if (rows.x.size() < 2) {
    in.fail("there are groups and x has no axis for them");
    return rows;
  }
  rows.weight.assign(rows.x.end() - 2, rows.x.end());
  in.require(rows.weight[0] > 0, "there are no groups");
  rows.weight_rows = {std::max<int64_t>(1, rows.weight[0]), 1};
  return rows;
}

inline Gate read_gate(Reader& in, const RowShapes& rows, Dtype dtype) {
  const Activation activation = read_activation(in, {Activation::silu, Activation::sigmoid});
  return {in.operand("gate", rows.x, dtype), activation, in.flag("gate_first")};
}

// What every forward with a gate takes first: x, gate and scale.
template <class Op>
RowShapes read_gated_operands(Reader& in, Op& p) {
  RowShapes rows = read_gated_rows(in, 0);
  p.rows = rows.rows;
  p.cols = rows.cols;
  p.weight_rows = rows.weight_rows;
  p.epsilon = in.attribute<float>("epsilon");
  p.scale_offset = in.attribute<float>("scale_offset");
  p.x = in.operand("x", rows.x);
  p.gate = read_gate(in, rows, p.x.dtype);
  if (in.flag("has_scale")) p.scale = in.operand("scale", rows.weight);
  return rows;
}

inline GatedNormForward read_gated_norm(Reader& in) {
  GatedNormForward p{};
  const RowShapes rows = read_gated_operands(in, p);
  p.y = in.result("y", rows.x, p.x.dtype);
  if (in.has_result(rows.statistics)) p.rstd = in.f32_result("rstd", rows.statistics);
  return p;
}

inline GatedNormBackward read_gated_norm_grad(Reader& in) {
  const RowShapes rows = read_gated_rows(in, 1);
  const bool has_scale = in.flag("has_scale"), with_dscale = in.flag("with_dscale");
  GatedNormBackward p{};
  p.rows = rows.rows;
  p.cols = rows.cols;
  p.weight_rows = rows.weight_rows;
  p.scale_offset = in.attribute<float>("scale_offset");
  p.dy = in.operand("dy", rows.x);
  const Dtype dtype = p.dy.dtype;
  p.x = in.operand("x", rows.x, dtype);
  p.gate = read_gate(in, rows, dtype);
  p.rstd = in.f32_operand("rstd", rows.statistics);
  if (has_scale) p.scale = in.operand("scale", rows.weight);
  in.require(has_scale || !with_dscale, "dscale is wanted and there is no scale");
  if (in.flag("with_dx")) p.dx = in.result("dx", rows.x, dtype);
  if (in.flag("with_dgate")) p.dgate = in.result("dgate", rows.x, dtype);
  if (with_dscale) p.dscale = in.result("dscale", rows.weight, p.scale.dtype);
  p.workspace = in.workspace();
  return p;
}

}  // namespace jaxnorm
