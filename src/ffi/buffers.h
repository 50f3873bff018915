// XLA's buffers, taken one by one in the order of a contract and checked.
#pragma once

#include <algorithm>
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

using Shape = std::vector<int64_t>;

// The start of every handler's binding; the platform adds its context.
template <class Attributes>
auto bind() {
  return ffi::Ffi::Bind().RemainingArgs().RemainingRets().template Attrs<Attributes>();
}

// The shapes that follow from x's and the number of normalised axes; `weight` and `heads`, from the first weight too.
struct Shapes {
  Shape x, statistics, weight;
  int64_t axes = 0, rows = 1, cols = 1;
  RowMap weight_rows;
  bool has_weight = false;
};

// Longer rows have no kernels with weights for each head.
inline constexpr int64_t kLongestWithHeads = 8192;

// The heads of a weight of shape (lead..., normalised...), whose lead is aligned to the right with x's other axes, each
// axis 1 or as long as x's; nothing where it has another shape, or no kernel takes it.
inline std::optional<RowMap> heads_of(const Shape& x, const Shape& weight, int64_t axes) {
  const int64_t rank = weight.size(), lead = rank - axes, before = static_cast<int64_t>(x.size()) - rank;
  if (lead < 0 || before < 0 || !std::equal(weight.end() - axes, weight.end(), x.end() - axes)) return std::nullopt;
  RowMap weight_rows;
  bool is_over = false;  // the axes along which the weights differ
  for (int64_t axis = lead - 1; axis >= 0; --axis) {
    const int64_t of_weight = weight[axis], of_x = x[before + axis];
    const bool differ = of_weight != 1;
    if (of_weight < 1 || (differ && (of_weight != of_x || is_over))) return std::nullopt;
    if (differ) weight_rows.count *= of_weight;
    if (!differ && of_x != 1) {
      if (weight_rows.count == 1) weight_rows.inner *= of_x;
      is_over = weight_rows.count > 1;
    }
  }
  if (weight_rows.count == 1) return RowMap{};
  weight_rows.inner = std::max<int64_t>(1, weight_rows.inner);
  return weight_rows;
}

// Takes a call's buffers one by one in the order of the contract and keeps the first thing that is wrong.
class Buffers {
 public:
  Buffers(Kind kind, const char* direction, ffi::RemainingArgs operands, ffi::RemainingRets results)
      : Buffers(std::string(kind == Kind::rms ? "jaxnorm_rms_norm_" : "jaxnorm_layer_norm_") + direction, operands,
                results) {}

  Buffers(std::string op, ffi::RemainingArgs operands, ffi::RemainingRets results)
      : operands_(operands), results_(results), op_(std::move(op)) {}

  // Reads the shapes off x, the operand of this index.
  Shapes shapes(int64_t axes, size_t index) {
    Shapes shapes;
    auto x = operands_.get<ffi::AnyBuffer>(index);
    if (!x) {
      fail("x is missing, operands that came: " + std::to_string(operands_.size()));
      return shapes;
    }
    const auto dims = x->dimensions();
    const int64_t rank = dims.size();
    if (axes < 1 || axes > rank) {
      fail("axes is " + std::to_string(axes) + ", expected from 1 to the rank of x " + text(*x));
      return shapes;
    }
    shapes.axes = axes;
    shapes.x.assign(dims.begin(), dims.end());
    shapes.weight.assign(dims.end() - axes, dims.end());
    shapes.statistics = shapes.x;
    bool overflow = false;
    for (int64_t axis = 0; axis < rank; ++axis) {
      int64_t& extent = axis < rank - axes ? shapes.rows : shapes.cols;
      overflow |= __builtin_mul_overflow(extent, dims[axis], &extent);
      if (axis >= rank - axes) shapes.statistics[axis] = 1;
    }
    if (overflow || shapes.cols < 1) fail("no row can be normalised in " + text(*x));
    return shapes;
  }

  // Scale or bias: the first that comes says what heads there are.
  Input weight(const char* name, Shapes& shapes) {
    if (auto buffer = operands_.get<ffi::AnyBuffer>(next_operand_)) adopt(*buffer, shapes);
    return operand(name, shapes.weight);
  }

  Output weight_result(const char* name, Shapes& shapes, std::optional<Dtype> dtype = std::nullopt) {
    if (auto buffer = results_.get<ffi::AnyBuffer>(next_result_)) adopt(**buffer, shapes);
    return result(name, shapes.weight, dtype);
  }

  // dy or y, of x's shape but for columns after each row, where one axis is normalised.
  Input padded_operand(const char* name, const Shapes& shapes, int64_t* pad) {
    auto buffer = operands_.get<ffi::AnyBuffer>(next_operand_);
    return operand(name, padded(buffer ? &*buffer : nullptr, shapes, pad));
  }

  Output padded_result(const char* name, const Shapes& shapes, int64_t* pad) {
    auto buffer = results_.get<ffi::AnyBuffer>(next_result_);
    return result(name, padded(buffer ? &**buffer : nullptr, shapes, pad));
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
  static Shape shape_of(const ffi::AnyBuffer& buffer) {
    return Shape(buffer.dimensions().begin(), buffer.dimensions().end());
  }

  static void adopt(const ffi::AnyBuffer& weight, Shapes& shapes) {
    if (shapes.has_weight) return;
    const Shape shape = shape_of(weight);
    const auto weight_rows = heads_of(shapes.x, shape, shapes.axes);
    shapes.has_weight = true;
    if (!weight_rows || (weight_rows->count > 1 && shapes.cols > kLongestWithHeads)) return;
    shapes.weight = shape;
    shapes.weight_rows = *weight_rows;
  }

  static Shape padded(const ffi::AnyBuffer* buffer, const Shapes& shapes, int64_t* pad) {
    Shape shape = shapes.x;
    if (!buffer || shapes.axes != 1 || buffer->dimensions().size() != shape.size()) return shape;
    *pad = std::max<int64_t>(0, buffer->dimensions().back() - shape.back());
    shape.back() += *pad;
    return shape;
  }

  static std::string text(const ffi::AnyBuffer& buffer) {
    std::ostringstream out;
    out << buffer.element_type() << text(shape_of(buffer));
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
    const auto dtype = dtype_of(buffer);
    const bool is_right = dtype && (wanted ? *dtype == *wanted : is_quantized(*dtype) == quantized);
    if (shape_of(buffer) != shape || !is_right) {
      const char* const names[] = {"F32", "F16", "BF16", "F8E4M3FN", "F8E5M2", "S8"};
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

}  // namespace jaxnorm
