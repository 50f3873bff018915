// From XLA's buffers and attributes to the operands of the kernels for rows that are split over devices.
#pragma once

#include "ffi/arguments.h"

namespace jaxnorm {

struct PartStatisticsAttributes {
  int64_t axes;  // how many trailing axes of x are normalised
};

struct PartApplyAttributes {
  int64_t axes;
  float scale_offset;
  bool multiply_before_cast, has_scale, has_bias;
};

}  // namespace jaxnorm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxnorm::PartStatisticsAttributes, StructMember<int64_t>("axes"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxnorm::PartApplyAttributes, StructMember<int64_t>("axes"),
                                      StructMember<float>("scale_offset"), StructMember<bool>("multiply_before_cast"),
                                      StructMember<bool>("has_scale"), StructMember<bool>("has_bias"));

namespace jaxnorm {

inline ffi::ErrorOr<ShardStatistics> part_statistics_arguments(Kind kind, ffi::RemainingArgs operands,
                                                               ffi::RemainingRets results,
                                                               const PartStatisticsAttributes& attributes) {
  Buffers buffers(kind, "statistics", operands, results);
  const Shapes shapes = buffers.shapes(attributes.axes, 0);
  ShardStatistics p{};
  p.kind = kind;
  p.rows = shapes.rows;
  p.cols = shapes.cols;
  p.x = buffers.operand("x", shapes.x);
  if (kind == Kind::layer) p.mean = buffers.f32_result("mean", shapes.statistics);
  p.variance = buffers.f32_result(kind == Kind::rms ? "mean_square" : "variance", shapes.statistics);
  return buffers.finish(p);
}

inline ffi::ErrorOr<ShardApply> part_apply_arguments(Kind kind, ffi::RemainingArgs operands, ffi::RemainingRets results,
                                                     const PartApplyAttributes& attributes) {
  Buffers buffers(kind, "apply", operands, results);
  const Shapes shapes = buffers.shapes(attributes.axes, 0);
  ShardApply p{};
  p.kind = kind;
  p.rows = shapes.rows;
  p.cols = shapes.cols;
  p.scale_offset = attributes.scale_offset;
  p.multiply_before_cast = attributes.multiply_before_cast;
  p.x = buffers.operand("x", shapes.x);
  if (kind == Kind::layer) p.mean = buffers.statistic("mean", shapes.statistics);
  p.rstd = buffers.statistic("rstd", shapes.statistics);
  if (attributes.has_scale) p.scale = buffers.operand("scale", shapes.weight);
  if (attributes.has_bias) p.bias = buffers.operand("bias", shapes.weight);
  p.y = buffers.result("y", shapes.x);
  buffers.require(is_supported(p.x.dtype, p.y.dtype), kPair);
  return buffers.finish(p);
}

}  // namespace jaxnorm
