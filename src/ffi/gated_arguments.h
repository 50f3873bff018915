// The operands and attributes of the norm that is gated; the rows are those of x's last axis.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "ffi/arguments.h"

namespace jaxnorm {

struct GatedForwardAttributes {
  float epsilon, scale_offset;
  std::string_view activation;
  bool gate_first, has_scale;
  bool grouped;  // scale has x's last two axes: neighbouring rows are the groups of a longer one
};

struct GatedBackwardAttributes {
  float scale_offset;
  std::string_view activation;
  bool gate_first, has_scale, grouped, with_dx, with_dgate, with_dscale;
};

}  // namespace jaxnorm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxnorm::GatedForwardAttributes, StructMember<float>("epsilon"),
                                      StructMember<float>("scale_offset"), StructMember<std::string_view>("activation"),
                                      StructMember<bool>("gate_first"), StructMember<bool>("has_scale"),
                                      StructMember<bool>("grouped"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxnorm::GatedBackwardAttributes, StructMember<float>("scale_offset"),
                                      StructMember<std::string_view>("activation"), StructMember<bool>("gate_first"),
                                      StructMember<bool>("has_scale"), StructMember<bool>("grouped"),
                                      StructMember<bool>("with_dx"), StructMember<bool>("with_dgate"),
                                      StructMember<bool>("with_dscale"));

namespace jaxnorm {

// The shape of scale, and which row of it is whose.
struct GatedScale {
  Shape shape;
  RowMap weight_rows;
};

inline GatedScale gated_scale(Buffers& buffers, const Shapes& shapes, bool grouped) {
  buffers.require(shapes.cols <= kGatedCols, "rows are longer than 16384 elements");
  if (!grouped) return {shapes.weight, {}};
  if (shapes.x.size() < 2) {
    buffers.require(false, "there are groups and x has no axis for them");
    return {};
  }
  Shape shape(shapes.x.end() - 2, shapes.x.end());
  const int64_t count = shape[0];
  buffers.require(count > 0, "there are no groups");
  return {std::move(shape), {std::max<int64_t>(1, count), 1}};
}

inline Gate gate_of(Buffers& buffers, Input data, std::string_view activation, bool first) {
  buffers.require(activation == "silu" || activation == "sigmoid", "activation is neither silu nor sigmoid");
  return {data, activation == "silu" ? Activation::silu : Activation::sigmoid, first};
}

inline ffi::ErrorOr<Forward> gated_forward_arguments(ffi::RemainingArgs operands, ffi::RemainingRets results,
                                                     const GatedForwardAttributes& attributes) {
  Buffers buffers("jaxnorm_gated_rms_norm_fwd", operands, results);
  const Shapes shapes = buffers.shapes(1, 0);
  const GatedScale scale = gated_scale(buffers, shapes, attributes.grouped);
  Forward f{};
  f.kind = Kind::rms;
  f.rows = shapes.rows;
  f.cols = shapes.cols;
  f.epsilon = attributes.epsilon;
  f.scale_offset = attributes.scale_offset;
  f.multiply_before_cast = true;
  f.weight_rows = scale.weight_rows;
  f.x = buffers.operand("x", shapes.x);
  const Input gate = buffers.operand("gate", shapes.x, f.x.dtype);
  f.gate = gate_of(buffers, gate, attributes.activation, attributes.gate_first);
  if (attributes.has_scale) f.scale = buffers.operand("scale", scale.shape);
  f.y = buffers.result("y", shapes.x, f.x.dtype);
  if (results.size() > 1) f.rstd = buffers.f32_result("rstd", shapes.statistics);
  return buffers.finish(f);
}

inline ffi::ErrorOr<Backward> gated_backward_arguments(ffi::RemainingArgs operands, ffi::RemainingRets results,
                                                       const GatedBackwardAttributes& attributes,
                                                       const Workspaces* workspaces = nullptr) {
  Buffers buffers("jaxnorm_gated_rms_norm_bwd", operands, results);
  const Shapes shapes = buffers.shapes(1, 0);
  const GatedScale scale = gated_scale(buffers, shapes, attributes.grouped);
  Backward b{};
  b.kind = Kind::rms;
  b.rows = shapes.rows;
  b.cols = shapes.cols;
  b.scale_offset = attributes.scale_offset;
  b.weight_rows = scale.weight_rows;
  b.dy = buffers.operand("dy", shapes.x);
  const Dtype dtype = b.dy.dtype;
  b.x = buffers.operand("x", shapes.x, dtype);
  const Input gate = buffers.operand("gate", shapes.x, dtype);
  b.gate = gate_of(buffers, gate, attributes.activation, attributes.gate_first);
  b.rstd = buffers.statistic("rstd", shapes.statistics);
  if (attributes.has_scale) b.scale = buffers.operand("scale", scale.shape);
  buffers.require(attributes.has_scale || !attributes.with_dscale, "dscale is wanted and there is no scale");
  if (attributes.with_dx) b.dx = buffers.result("dx", shapes.x, dtype);
  if (attributes.with_dgate) b.dgate = buffers.result("dgate", shapes.x, dtype);
  if (attributes.with_dscale) b.dscale = buffers.result("dscale", scale.shape, b.scale.dtype);
  if (workspaces && attributes.with_dscale) {
    const int64_t partial_rows = workspaces->partial_rows(dtype, b.cols, b.weight_rows);
    b.workspace = buffers.f32_result("workspace", {1, partial_rows, b.weight_rows.count * b.cols});
  }
  return buffers.finish(b);
}

}  // namespace jaxnorm
