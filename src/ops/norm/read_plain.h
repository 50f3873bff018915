// The readers of RMSNorm and LayerNorm, plain and of a sum.
#pragma once

#include "ffi/reader.h"
#include "ops/norm/call.h"

namespace jaxnorm {

// What exported programs and messages call an addend: users know it as that of a residual connection.
namespace called {

inline constexpr const char* kAddend = "residual";
inline constexpr const char* kHasAddend = "has_residual";
inline constexpr const char* kUnlikeX = "x and residual have different dtypes and neither is F32";

}  // namespace called

// What every norm of x, or of the sum of x and an addend, takes first: x, the addend, scale and bias.
template <class Op>
RowShapes read_norm_operands(Reader& in, Kind kind, Op& p, bool has_addend, bool has_weight_rows = true) {
  RowShapes rows = in.rows(in.attribute<int64_t>("axes"));
  rows.has_weight = !has_weight_rows;
  p.kind = kind;
  p.rows = rows.rows;
  p.cols = rows.cols;
  p.epsilon = in.attribute<float>("epsilon");
  p.scale_offset = in.attribute<float>("scale_offset");
  p.x = in.operand("x", rows.x);
  if (has_addend) p.addend = in.operand(called::kAddend, rows.x);
  if (in.flag("has_scale")) p.scale = in.weight("scale", rows);
  if (in.flag("has_bias")) p.bias = in.weight("bias", rows);
  p.weight_rows = rows.weight_rows;
  return rows;
}

// And what it gives last: the sum, and the statistics where they are wanted.
template <class Op>
void read_norm_results(Reader& in, const RowShapes& rows, Op& p, bool has_addend, bool with_sum = true) {
  if (has_addend) {
    if (with_sum) p.sum = in.result("sum", rows.x, p.addend.dtype);
    in.require(is_supported(p.x.dtype, p.addend.dtype), called::kUnlikeX);
  }
  if (!in.has_result(rows.statistics)) return;
  if (p.kind == Kind::layer) p.mean = in.f32_result("mean", rows.statistics);
  p.rstd = in.f32_result("rstd", rows.statistics);
}

// What x is multiplied by before it is added, with its rows among those of `rows`.
inline void read_branch_scale(Reader& in, RowShapes& rows, bool has_addend, Input& branch_scale, RowMap& map) {
  if (!in.later_flag("has_branch_scale")) return;
  in.require(has_addend, "branch_scale came and no residual");
  branch_scale = in.weight("branch_scale", rows);
  map = rows.weight_rows;
}

inline constexpr const char* kPair = "what is normalised and y (or dy) have different dtypes and neither is F32";

template <Kind kind>
ScaledAddNormForward read_norm(Reader& in) {
  ScaledAddNormForward p{};
  const bool has_addend = in.flag(called::kHasAddend), with_sum = !in.later_flag("without_sum");
  RowShapes rows = read_norm_operands(in, kind, p, has_addend);
  read_branch_scale(in, rows, has_addend, p.branch_scale, p.weight_rows);
  p.multiply_before_cast = in.flag("multiply_before_cast");
  p.y = in.padded_result("y", rows, &p.y_stride);
  in.require(is_supported(has_addend ? p.addend.dtype : p.x.dtype, p.y.dtype), kPair);
  in.require(with_sum || (has_addend && p.y.dtype == p.addend.dtype && p.y_stride == p.cols),
             "the sum is left out, and y has no room for it");
  read_norm_results(in, rows, p, has_addend, with_sum);
  p.workspace = in.workspace();
  return p;
}

template <Kind kind>
NormBackward read_norm_grad(Reader& in) {
  RowShapes rows = in.rows(in.attribute<int64_t>("axes"), 1);
  const bool has_scale = in.flag("has_scale"), has_dsum = in.flag("has_dsum");
  const bool with_dx = in.flag("with_dx"), with_dscale = in.flag("with_dscale");
  NormBackward p{};
  p.kind = kind;
  p.rows = rows.rows;
  p.cols = rows.cols;
  p.scale_offset = in.attribute<float>("scale_offset");
  p.dy = in.padded_operand("dy", rows, &p.dy_stride);
  p.x = in.operand("x", rows.x);
  in.require(is_supported(p.x.dtype, p.dy.dtype), kPair);
  if (kind == Kind::layer) p.mean = in.f32_operand("mean", rows.statistics);
  p.rstd = in.f32_operand("rstd", rows.statistics);
  if (has_scale) p.scale = in.weight("scale", rows);
  if (has_dsum) p.dsum = in.operand("dsum", rows.x, p.x.dtype);
  in.require(has_scale || !with_dscale, "dscale is wanted and there is no scale");
  in.require(with_dx || !has_dsum, "dsum came and dx is not wanted");
  if (with_dx) p.dx = in.result("dx", rows.x, p.x.dtype);
  if (with_dscale) p.dscale = in.weight_result("dscale", rows, p.scale.dtype);
  if (in.flag("with_dbias")) p.dbias = in.weight_result("dbias", rows);
  p.weight_rows = rows.weight_rows;
  p.workspace = in.workspace();
  return p;
}

}  // namespace jaxnorm
