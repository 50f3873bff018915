// From XLA's buffers and attributes to the operands of a kernel, the same on every platform.
//
// A kernel trusts its pointers and sizes, so everything that Python checked while tracing is checked here again.
#pragma once

#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "norm.h"
#include "xla/ffi/api/ffi.h"

namespace jaxnorm {

namespace ffi = xla::ffi;

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

using Shape = std::vector<int64_t>;

// The start of every handler's binding; the platform adds its context.
template <class Attributes>
auto bind() {
  return ffi::Ffi::Bind().RemainingArgs().RemainingRets().template Attrs<Attributes>();
}

// The shapes that follow from x's and the number of normalised axes.
struct Shapes {
  Shape x, weight, statistics;
  int64_t rows = 1, cols = 1;
};

// Takes a call's buffers one by one in the order of the contract and keeps the first thing that is wrong.
class Buffers {
 public:
  Buffers(Kind kind, const char* direction, ffi::RemainingArgs operands, ffi::RemainingRets results)
      : operands_(operands), results_(results) {
    op_ = std::string(kind == Kind::rms ? "jaxnorm_rms_norm_" : "jaxnorm_layer_norm_") + direction;
  }

  // Reads the shapes off the first operand, which has x's shape in every op.
  Shapes shapes(int64_t axes) {
    Shapes shapes;
    auto first = operands_.get<ffi::AnyBuffer>(0);
    if (!first) {
      fail("no operands came");
      return shapes;
    }
    const auto dims = first->dimensions();
    const int64_t rank = dims.size();
    if (axes < 1 || axes > rank) {
      fail("axes is " + std::to_string(axes) + ", expected from 1 to the rank of the first operand " + text(*first));
      return shapes;
    }
    shapes.x.assign(dims.begin(), dims.end());
    shapes.weight.assign(dims.end() - axes, dims.end());
    shapes.statistics = shapes.x;
    bool overflow = false;
    for (int64_t axis = 0; axis < rank; ++axis) {
      int64_t& extent = axis < rank - axes ? shapes.rows : shapes.cols;
      overflow |= __builtin_mul_overflow(extent, dims[axis], &extent);
      if (axis >= rank - axes) shapes.statistics[axis] = 1;
    }
    if (overflow || shapes.cols < 1) fail("no row can be normalised in " + text(*first));
    return shapes;
  }

  Input operand(const char* name, const Shape& shape, std::optional<Dtype> dtype = std::nullopt) {
    auto buffer = operands_.get<ffi::AnyBuffer>(next_operand_++);
    if (!buffer) {
      fail(std::string(name) + " is missing, operands that came: " + std::to_string(operands_.size()));
      return {};
    }
    return {buffer->untyped_data(), checked(name, *buffer, shape, dtype, false)};
  }

  Output result(const char* name, const Shape& shape, std::optional<Dtype> dtype = std::nullopt,
                bool quantized = false) {
    auto buffer = results_.get<ffi::AnyBuffer>(next_result_++);
    if (!buffer) {
      fail(std::string(name) + " is missing, results that came: " + std::to_string(results_.size()));
      return {};
    }
    return {(*buffer)->untyped_data(), checked(name, **buffer, shape, dtype, quantized)};
  }

  const float* statistic(const char* name, const Shape& shape) {
    return static_cast<const float*>(operand(name, shape, Dtype::f32).data);
  }

  float* f32_result(const char* name, const Shape& shape) {
    return static_cast<float*>(result(name, shape, Dtype::f32).data);
  }

  void require(bool condition, const char* message) {
    if (!condition) fail(message);
  }

  template <class Arguments>
  ffi::ErrorOr<Arguments> finish(Arguments arguments) {
    check_count("operands", operands_.size(), next_operand_);
    check_count("results", results_.size(), next_result_);
    if (!error_.empty()) return ffi::Unexpected(ffi::Error::InvalidArgument(op_ + ": " + error_));
    return arguments;
  }

 private:
  static std::string text(const ffi::AnyBuffer& buffer) {
    std::ostringstream out;
    out << buffer.element_type() << text(Shape(buffer.dimensions().begin(), buffer.dimensions().end()));
    return out.str();
  }

  static std::string text(const Shape& shape) {
    std::string out;
    for (int64_t extent : shape) out += (out.empty() ? "" : ",") + std::to_string(extent);
    return "[" + out + "]";
  }

  static std::optional<Dtype> dtype_of(const ffi::AnyBuffer& buffer) {
    switch (buffer.element_type()) {
      case ffi::F32:
        return Dtype::f32;
      case ffi::F16:
        return Dtype::f16;
      case ffi::BF16:
        return Dtype::bf16;
      case ffi::F8E4M3FN:
        return Dtype::f8e4m3fn;
      case ffi::F8E5M2:
        return Dtype::f8e5m2;
      case ffi::S8:
        return Dtype::s8;
      default:
        return std::nullopt;
    }
  }

  // Without a dtype that is wanted, any of those that are quantised to, or any of the others, will do.
  Dtype checked(const char* name, const ffi::AnyBuffer& buffer, const Shape& shape, std::optional<Dtype> wanted,
                bool quantized) {
    const auto dims = buffer.dimensions();
    const auto dtype = dtype_of(buffer);
    const bool is_right = dtype && (wanted ? *dtype == *wanted : is_quantized(*dtype) == quantized);
    if (Shape(dims.begin(), dims.end()) != shape || !is_right) {
      const char* const names[] = {"F32", "F16", "BF16"};
      const char* const any = quantized ? "F8E4M3FN, F8E5M2 or S8 of shape " : "F32, F16 or BF16 of shape ";
      fail(std::string(name) + " is " + text(buffer) + ", expected " +
           (wanted ? names[static_cast<int>(*wanted)] : any) + text(shape));
    }
    return dtype.value_or(Dtype::f32);
  }

  void check_count(const char* what, size_t came, size_t expected) {
    if (came == expected) return;
    fail(std::string("number of ") + what + " is " + std::to_string(came) + ", expected " + std::to_string(expected));
  }

  void fail(std::string message) {
    if (error_.empty()) error_ = std::move(message);
  }

  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  size_t next_operand_ = 0, next_result_ = 0;
  std::string op_, error_;
};

inline constexpr const char* kPair = "what is normalised and y (or dy) have different dtypes and neither is F32";

// What every forward has before its own attributes and results.
template <class Attributes>
Forward forward_operands(Kind kind, Buffers& buffers, const Shapes& shapes, const Attributes& attributes) {
  Forward f{};
  f.kind = kind;
  f.rows = shapes.rows;
  f.cols = shapes.cols;
  f.epsilon = attributes.epsilon;
  f.scale_offset = attributes.scale_offset;
  f.x = buffers.operand("x", shapes.x);
  if (attributes.has_residual) f.residual = buffers.operand("residual", shapes.x);
  if (attributes.has_scale) f.scale = buffers.operand("scale", shapes.weight);
  if (attributes.has_bias) f.bias = buffers.operand("bias", shapes.weight);
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
                                               const ForwardAttributes& attributes) {
  Buffers buffers(kind, "fwd", operands, results);
  const Shapes shapes = buffers.shapes(attributes.axes);
  const bool has_residual = attributes.has_residual;
  Forward f = forward_operands(kind, buffers, shapes, attributes);
  f.multiply_before_cast = attributes.multiply_before_cast;
  f.y = buffers.result("y", shapes.x);
  buffers.require(is_supported(has_residual ? f.residual.dtype : f.x.dtype, f.y.dtype), kPair);
  forward_results(f, buffers, shapes, has_residual, results.size() > (has_residual ? 2 : 1));
  return buffers.finish(f);
}

inline ffi::ErrorOr<Forward> quantized_arguments(Kind kind, ffi::RemainingArgs operands, ffi::RemainingRets results,
                                                 const QuantizedAttributes& attributes) {
  Buffers buffers(kind, "quantized_fwd", operands, results);
  const Shapes shapes = buffers.shapes(attributes.axes);
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

// The workspaces that a platform's backward has among its results.
struct Workspaces {
  int (*row_segments)(Dtype x, int64_t cols);      // how many pairs of sums of each row; 0: none
  int64_t (*partial_rows)(Dtype x, int64_t cols);  // how many rows of partial sums of dscale, and of dbias
};

inline ffi::ErrorOr<Backward> backward_arguments(Kind kind, ffi::RemainingArgs operands, ffi::RemainingRets results,
                                                 const BackwardAttributes& attributes,
                                                 const Workspaces* workspaces = nullptr) {
  Buffers buffers(kind, "bwd", operands, results);
  const Shapes shapes = buffers.shapes(attributes.axes);
  Backward b{};
  b.kind = kind;
  b.rows = shapes.rows;
  b.cols = shapes.cols;
  b.scale_offset = attributes.scale_offset;
  b.dy = buffers.operand("dy", shapes.x);
  b.x = buffers.operand("x", shapes.x);
  buffers.require(is_supported(b.x.dtype, b.dy.dtype), kPair);
  if (kind == Kind::layer) b.mean = buffers.statistic("mean", shapes.statistics);
  b.rstd = buffers.statistic("rstd", shapes.statistics);
  if (attributes.has_scale) b.scale = buffers.operand("scale", shapes.weight);
  if (attributes.has_dsum) b.dsum = buffers.operand("dsum", shapes.x, b.x.dtype);
  buffers.require(attributes.has_scale || !attributes.with_dscale, "dscale is wanted and there is no scale");
  buffers.require(attributes.with_dx || !attributes.has_dsum, "dsum came and dx is not wanted");
  if (attributes.with_dx) b.dx = buffers.result("dx", shapes.x, b.x.dtype);
  if (attributes.with_dscale) b.dscale = buffers.result("dscale", shapes.weight, b.scale.dtype);
  if (attributes.with_dbias) b.dbias = buffers.result("dbias", shapes.weight);
  if (!workspaces) return buffers.finish(b);
  if (const int segments = workspaces->row_segments(b.x.dtype, b.cols); segments > 0 && attributes.with_dx) {
    Shape row_sums(shapes.x.begin(), shapes.x.end() - shapes.weight.size());
    row_sums.push_back(2 * segments);
    b.row_sums = buffers.f32_result("row_sums", row_sums);
  }
  if (const int64_t sums = attributes.with_dscale + attributes.with_dbias; sums > 0) {
    b.workspace = buffers.f32_result("workspace", {sums, workspaces->partial_rows(b.x.dtype, b.cols), b.cols});
  }
  return buffers.finish(b);
}

}  // namespace jaxnorm
