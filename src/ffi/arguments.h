// From XLA's buffers and attributes to the operands of a kernel, the same on every platform.
//
// A kernel trusts its pointers and sizes, so everything that Python checked while tracing is checked here again.
#pragma once

#include <cstdint>
#include <optional>

#include "ffi/buffers.h"

namespace jaxnorm {

struct ForwardAttributes {
  int64_t axes;  // how many trailing axes of x are normalised
  float epsilon, scale_offset;
  bool multiply_before_cast, has_residual, has_scale, has_bias;
};

struct QuantizedAttributes {
  int64_t axes, group;  // group: how many columns share a scale; 0: all of a row
  float epsilon, scale_offset, max_scale;
  bool power_of_two, has_residual, has_scale, has_bias, has_smooth, has_given;
};

struct BackwardAttributes {
  int64_t axes;
  float scale_offset;
  bool has_scale, has_dsum, with_dx, with_dscale, with_dbias;
};

}  // namespace jaxnorm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxnorm::ForwardAttributes, StructMember<int64_t>("axes"),
                                      StructMember<float>("epsilon"), StructMember<float>("scale_offset"),
                                      StructMember<bool>("multiply_before_cast"), StructMember<bool>("has_residual"),
                                      StructMember<bool>("has_scale"), StructMember<bool>("has_bias"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxnorm::QuantizedAttributes, StructMember<int64_t>("axes"),
                                      StructMember<int64_t>("group"), StructMember<float>("epsilon"),
                                      StructMember<float>("scale_offset"), StructMember<float>("max_scale"),
                                      StructMember<bool>("power_of_two"), StructMember<bool>("has_residual"),
                                      StructMember<bool>("has_scale"), StructMember<bool>("has_bias"),
                                      StructMember<bool>("has_smooth"), StructMember<bool>("has_given"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxnorm::BackwardAttributes, StructMember<int64_t>("axes"),
                                      StructMember<float>("scale_offset"), StructMember<bool>("has_scale"),
                                      StructMember<bool>("has_dsum"), StructMember<bool>("with_dx"),
                                      StructMember<bool>("with_dscale"), StructMember<bool>("with_dbias"));

namespace jaxnorm {

inline constexpr const char* kPair = "what is normalised and y (or dy) have different dtypes and neither is F32";

// The workspaces that a platform has among its results.
struct Workspaces {
  // Whether there is one of a forward, with room for a count.
  bool (*has_tickets)(Kind kind, Dtype x, int64_t cols);
  // Of a backward: how many pairs of sums of each row; 0: none.
  int (*row_segments)(Dtype x, int64_t cols);
  // How many rows of partial sums of dscale, and of dbias; for heads with neighbouring rows, each time they come.
  int64_t (*partial_rows)(Dtype x, int64_t cols, RowMap heads);
};

// What every forward has before its own attributes and results.
template <class Attributes>
Forward forward_operands(Kind kind, Buffers& buffers, Shapes& shapes, const Attributes& attributes) {
  Forward f{};
  f.kind = kind;
  f.rows = shapes.rows;
  f.cols = shapes.cols;
  f.epsilon = attributes.epsilon;
  f.scale_offset = attributes.scale_offset;
  f.x = buffers.operand("x", shapes.x);
  if (attributes.has_residual) f.residual = buffers.operand("residual", shapes.x);
  if (attributes.has_scale) f.scale = buffers.weight("scale", shapes);
  if (attributes.has_bias) f.bias = buffers.weight("bias", shapes);
  f.weight_rows = shapes.weight_rows;
  return f;
}

// And after them: the sum, and the statistics if there are `more` results.
inline void forward_results(Forward& f, Buffers& buffers, const Shapes& shapes, bool has_residual, bool more) {
  if (has_residual) {
    f.sum = buffers.result("sum", shapes.x, f.residual.dtype);
    buffers.require(is_supported(f.x.dtype, f.residual.dtype),
                    "x and residual have different dtypes and neither is F32");
  }
  if (!more) return;
  if (f.kind == Kind::layer) f.mean = buffers.f32_result("mean", shapes.statistics);
  f.rstd = buffers.f32_result("rstd", shapes.statistics);
}

inline ffi::ErrorOr<Forward> forward_arguments(Kind kind, ffi::RemainingArgs operands, ffi::RemainingRets results,
                                               const ForwardAttributes& attributes,
                                               const Workspaces* workspaces = nullptr) {
  Buffers buffers(kind, "fwd", operands, results);
  Shapes shapes = buffers.shapes(attributes.axes, 0);
  const bool has_residual = attributes.has_residual;
  Forward f = forward_operands(kind, buffers, shapes, attributes);
  f.multiply_before_cast = attributes.multiply_before_cast;
  f.y = buffers.padded_result("y", shapes, &f.y_pad);
  buffers.require(is_supported(has_residual ? f.residual.dtype : f.x.dtype, f.y.dtype), kPair);
  const bool draws = workspaces && workspaces->has_tickets(kind, has_residual ? f.residual.dtype : f.x.dtype, f.cols);
  forward_results(f, buffers, shapes, has_residual, results.size() > size_t{1} + has_residual + draws);
  if (draws) f.tickets = reinterpret_cast<uint32_t*>(buffers.f32_result("tickets", {1}));
  return buffers.finish(f);
}

inline ffi::ErrorOr<Forward> quantized_arguments(Kind kind, ffi::RemainingArgs operands, ffi::RemainingRets results,
                                                 const QuantizedAttributes& attributes) {
  Buffers buffers(kind, "quantized_fwd", operands, results);
  Shapes shapes = buffers.shapes(attributes.axes, 0);
  shapes.has_weight = true;  // of the plain shape: what is quantised has no heads
  const int64_t group = attributes.group;
  const bool is_row = group == 0, has_given = attributes.has_given;
  buffers.require(is_row || group == 64 || group == 128, "group is neither 0, for a row, nor 64 nor 128");
  buffers.require(is_row || (attributes.axes == 1 && shapes.cols % group == 0),
                  "the last axis is not the only one that is normalised, or group does not divide it");
  buffers.require(is_row || !has_given, "there are groups and their scale is given");
  buffers.require(attributes.max_scale >= 0x1p-126f, "max_scale is below the smallest normal float");
  Forward f = forward_operands(kind, buffers, shapes, attributes);
  f.multiply_before_cast = true;
  Quantization& q = f.quantized;
  q.group = is_row ? shapes.cols : group;
  q.max_scale = attributes.max_scale;
  q.power_of_two = attributes.power_of_two;
  if (attributes.has_smooth) q.smooth = buffers.operand("smooth_scale", shapes.weight);
  if (has_given) q.given = buffers.statistic("static_scale", {});
  q.values = buffers.result("values", shapes.x, std::nullopt, /*quantized=*/true);
  if (!has_given) {
    Shape scales = shapes.statistics;
    if (!is_row && !scales.empty()) scales.back() = shapes.cols / group;
    q.scales = buffers.f32_result("scales", scales);
  }
  const size_t without_statistics = 1 + !has_given + attributes.has_residual;
  forward_results(f, buffers, shapes, attributes.has_residual, results.size() > without_statistics);
  return buffers.finish(f);
}

inline ffi::ErrorOr<Backward> backward_arguments(Kind kind, ffi::RemainingArgs operands, ffi::RemainingRets results,
                                                 const BackwardAttributes& attributes,
                                                 const Workspaces* workspaces = nullptr) {
  Buffers buffers(kind, "bwd", operands, results);
  Shapes shapes = buffers.shapes(attributes.axes, 1);
  Backward b{};
  b.kind = kind;
  b.rows = shapes.rows;
  b.cols = shapes.cols;
  b.scale_offset = attributes.scale_offset;
  b.dy = buffers.padded_operand("dy", shapes, &b.dy_pad);
  b.x = buffers.operand("x", shapes.x);
  buffers.require(is_supported(b.x.dtype, b.dy.dtype), kPair);
  if (kind == Kind::layer) b.mean = buffers.statistic("mean", shapes.statistics);
  b.rstd = buffers.statistic("rstd", shapes.statistics);
  if (attributes.has_scale) b.scale = buffers.weight("scale", shapes);
  if (attributes.has_dsum) b.dsum = buffers.operand("dsum", shapes.x, b.x.dtype);
  buffers.require(attributes.has_scale || !attributes.with_dscale, "dscale is wanted and there is no scale");
  buffers.require(attributes.with_dx || !attributes.has_dsum, "dsum came and dx is not wanted");
  if (attributes.with_dx) b.dx = buffers.result("dx", shapes.x, b.x.dtype);
  if (attributes.with_dscale) b.dscale = buffers.weight_result("dscale", shapes, b.scale.dtype);
  if (attributes.with_dbias) b.dbias = buffers.weight_result("dbias", shapes);
  b.weight_rows = shapes.weight_rows;
  if (!workspaces) return buffers.finish(b);
  if (const int segments = workspaces->row_segments(b.x.dtype, b.cols); segments > 0 && attributes.with_dx) {
    Shape row_sums(shapes.x.begin(), shapes.x.end() - shapes.axes);
    row_sums.push_back(2 * segments);
    b.row_sums = buffers.f32_result("row_sums", row_sums);
  }
  if (const int64_t sums = attributes.with_dscale + attributes.with_dbias; sums > 0) {
    const int64_t rows = workspaces->partial_rows(b.x.dtype, b.cols, b.weight_rows);
    b.workspace = buffers.f32_result("workspace", {sums, rows, b.weight_rows.count * b.cols});
  }
  return buffers.finish(b);
}

}  // namespace jaxnorm
