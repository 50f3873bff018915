// The readers of the norms, plain and of a sum, quantised, gated, and of rows that are sharded over devices; and their
// table.
#pragma once

#include <algorithm>
#include <string>

#include "ffi/table.h"
#include "ops/norm/call.h"
#include "ops/shared/read.h"

namespace jaxnorm {

// What every norm of x, or of the sum of x and an addend, takes first: x, the addend, scale and bias.
template <class Op>
RowShapes read_norm_operands(Reader& in, Kind kind, Op& p, bool has_addend, bool has_weight_rows = true) {
  RowShapes rows = in.rows(p, in.attribute<int64_t>("axes"));
  rows.has_weight = !has_weight_rows;
  p.kind = kind;
  p.epsilon = in.attribute<float>("epsilon");
  p.scale_offset = in.attribute<float>("scale_offset");
  p.x = in.operand("x", rows.x);
  if (has_addend) p.addend = in.operand("residual", rows.x);
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
    in.require(is_supported(p.x.dtype, p.addend.dtype), "x and residual have different dtypes and neither is F32");
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
  const bool has_addend = in.flag("has_residual"), with_sum = !in.later_flag("without_sum");
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
  NormBackward p{};
  RowShapes rows = in.rows(p, in.attribute<int64_t>("axes"), 1);
  const bool has_scale = in.flag("has_scale"), has_dsum = in.flag("has_dsum");
  const bool with_dx = in.flag("with_dx"), with_dscale = in.flag("with_dscale");
  p.kind = kind;
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

template <Kind kind>
ScaledAddQuantizedNormForward read_quantized_norm(Reader& in) {
  ScaledAddQuantizedNormForward p{};
  const bool has_addend = in.flag("has_residual");
  const RowShapes rows = read_norm_operands(in, kind, p, has_addend, /*has_weight_rows=*/false);
  RowShapes branch = in.rows(rows.axes);
  read_branch_scale(in, branch, has_addend, p.branch_scale, p.branch_rows);
  read_quantization(in, rows, p.quantized);
  if (in.later_flag("with_y")) p.y = in.result("y", rows.x, p.x.dtype);
  read_norm_results(in, rows, p, has_addend);
  return p;
}

// The shapes of gated rows, those of the last axis of x, the operand of this index. `grouped`: scale has x's last two
// axes, and neighbouring rows are the groups of a longer one.
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

inline GatedNormQuantizedForward read_gated_norm_quantized(Reader& in) {
  GatedNormQuantizedForward p{};
  p.kind = Kind::rms;
  const RowShapes rows = read_gated_operands(in, p);
  read_quantization(in, rows, p.quantized);
  if (in.has_result(rows.statistics)) p.rstd = in.f32_result("rstd", rows.statistics);
  return p;
}

template <Kind kind>
ShardStatistics read_shard_statistics(Reader& in) {
  ShardStatistics p{};
  const RowShapes rows = in.rows(p, in.attribute<int64_t>("axes"));
  p.kind = kind;
  p.x = in.operand("x", rows.x);
  if (kind == Kind::layer) p.mean = in.f32_result("mean", rows.statistics);
  p.variance = in.f32_result(kind == Kind::rms ? "mean_square" : "variance", rows.statistics);
  return p;
}

template <Kind kind>
ShardApply read_shard_apply(Reader& in) {
  ShardApply p{};
  const RowShapes rows = in.rows(p, in.attribute<int64_t>("axes"));
  p.kind = kind;
  p.scale_offset = in.attribute<float>("scale_offset");
  p.multiply_before_cast = in.flag("multiply_before_cast");
  p.x = in.operand("x", rows.x);
  if (kind == Kind::layer) p.mean = in.f32_operand("mean", rows.statistics);
  p.rstd = in.f32_operand("rstd", rows.statistics);
  if (in.flag("has_scale")) p.scale = in.operand("scale", rows.weight);
  if (in.flag("has_bias")) p.bias = in.operand("bias", rows.weight);
  p.y = in.result("y", rows.x);
  in.require(is_supported(p.x.dtype, p.y.dtype), kPair);
  return p;
}

namespace ops::norm {

template <class Platform>
inline constexpr std::tuple kTable{
    Row{"jaxnorm_rms_norm_fwd", read_norm<Kind::rms>, Platform::workspace(cuda::norm_workspace<Kind::rms>)},
    Row{"jaxnorm_layer_norm_fwd", read_norm<Kind::layer>, Platform::workspace(cuda::norm_workspace<Kind::layer>)},
    Row{"jaxnorm_rms_norm_quantized_fwd", read_quantized_norm<Kind::rms>},
    Row{"jaxnorm_layer_norm_quantized_fwd", read_quantized_norm<Kind::layer>},
    Row{"jaxnorm_gated_rms_norm_fwd", read_gated_norm},
    Row{"jaxnorm_gated_rms_norm_quantized_fwd", read_gated_norm_quantized},
    Row{"jaxnorm_rms_norm_bwd", read_norm_grad<Kind::rms>, Platform::workspace(cuda::norm_grad_workspace)},
    Row{"jaxnorm_layer_norm_bwd", read_norm_grad<Kind::layer>, Platform::workspace(cuda::norm_grad_workspace)},
    Row{"jaxnorm_gated_rms_norm_bwd", read_gated_norm_grad, Platform::workspace(cuda::gated_norm_grad_workspace)},
    CudaRow{"jaxnorm_rms_norm_statistics", read_shard_statistics<Kind::rms>},
    CudaRow{"jaxnorm_layer_norm_statistics", read_shard_statistics<Kind::layer>},
    CudaRow{"jaxnorm_rms_norm_apply", read_shard_apply<Kind::rms>},
    CudaRow{"jaxnorm_layer_norm_apply", read_shard_apply<Kind::layer>},
    Limit{"per_head_cols", kPerHeadCols},
    Limit{"gated_cols", kGatedCols},
    Limit{"groups", kGroups},
    Limit{"smallest_scale", kSmallestScale},
};

}  // namespace ops::norm

}  // namespace jaxnorm
