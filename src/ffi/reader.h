// A call's attributes and buffers, taken one by one in the order of its contract and checked.
//
// A kernel trusts its pointers and sizes, so everything that Python checked while tracing is checked here again. The
// first thing that is wrong becomes the call's error; what is read after it is of no use, and harmless.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "ffi/shapes.h"

namespace jaxnorm {

class Reader {
 public:
  // `has_workspace`: whether the op may have one.
  Reader(const char* target, ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes,
         bool has_workspace)
      : target_(target),
        operands_(operands),
        results_(results),
        attributes_(attributes),
        has_workspace_(has_workspace) {}

  template <class T>
  T attribute(const char* name) {
    ++attributes_read_;
    const auto value = attributes_.get<T>(name);
    if (value) return *value;
    fail(std::string("among the attributes, ") + name + ": " + value.error().message());
    return {};
  }

  bool flag(const char* name) { return attribute<bool>(name); }

  // Of those that programs of before do not have, and others only where they are set.
  bool has_attribute(const char* name) const { return attributes_.contains(name); }
  bool later_flag(const char* name) { return has_attribute(name) && flag(name); }

  // The shape of the operand of this index, which is read later.
  Shape operand_shape(const char* name, size_t index) {
    if (const auto buffer = operands_.get<ffi::AnyBuffer>(index)) return shape_of(*buffer);
    fail_missing(name, "operands", operands_.size());
    return {};
  }

  // That of the operand that comes next; empty where there is none.
  Shape next_operand_shape() const {
    const auto buffer = operands_.get<ffi::AnyBuffer>(next_operand_);
    return buffer ? shape_of(*buffer) : Shape{};
  }

  // Those of the operand x of this index, of which the last `axes` are normalised.
  RowShapes rows(int64_t axes, size_t index = 0) {
    RowShapes rows;
    const auto x = operands_.get<ffi::AnyBuffer>(index);
    if (!x) {
      fail_missing("x", "operands", operands_.size());
      return rows;
    }
    rows.x = rows.statistics = shape_of(*x);
    const int64_t rank = rows.x.size();
    if (axes < 1 || axes > rank) {
      fail("axes is " + std::to_string(axes) + ", expected from 1 to the rank of x " + text(*x));
      return {};
    }
    rows.axes = axes;
    rows.weight.assign(rows.x.end() - axes, rows.x.end());
    bool overflow = false;
    for (int64_t axis = 0; axis < rank; ++axis) {
      int64_t& extent = axis < rank - axes ? rows.rows : rows.cols;
      overflow |= __builtin_mul_overflow(extent, rows.x[axis], &extent);
      if (axis >= rank - axes) rows.statistics[axis] = 1;
    }
    if (overflow || rows.cols < 1) fail("no row can be normalised in " + text(*x));
    return rows;
  }

  // The same, for an op that is told how many rows and columns there are.
  template <class Op>
  RowShapes rows(Op& p, int64_t axes, size_t index = 0) {
    RowShapes shapes = rows(axes, index);
    p.rows = shapes.rows;
    p.cols = shapes.cols;
    return shapes;
  }

  // Without a dtype that is wanted, any but those of 8 bits will do.
  Input operand(const char* name, const Shape& shape, std::optional<Dtype> dtype = std::nullopt) {
    return operand(name, shape, dtype, kWide);
  }

  // An operand of any float of 8 bits.
  Input float8_operand(const char* name, const Shape& shape) { return operand(name, shape, std::nullopt, kFloat8); }

  Output result(const char* name, const Shape& shape, std::optional<Dtype> dtype = std::nullopt) {
    return result(name, shape, dtype, kWide);
  }

  // A result of any dtype of 8 bits.
  Output quantized_result(const char* name, const Shape& shape) {
    return result(name, shape, std::nullopt, kQuantized);
  }

  const float* f32_operand(const char* name, const Shape& shape) {
    return static_cast<const float*>(operand(name, shape, Dtype::f32).data);
  }

  float* f32_result(const char* name, const Shape& shape) {
    return static_cast<float*>(result(name, shape, Dtype::f32).data);
  }

  // One integer for each row, as the number of a column; the kernel checks its range.
  const int32_t* i32_operand(const char* name, const Shape& shape) {
    return static_cast<const int32_t*>(plain_operand(name, shape, ffi::S32));
  }

  int32_t* i32_result(const char* name, const Shape& shape) {
    return static_cast<int32_t*>(plain_result(name, shape, ffi::S32));
  }

  // The operand of x's rank that comes next, with a row of `cols` elements for several of x, and which of its rows goes
  // with which of x. Along each leading axis it is 1 long or as long as x. Without `cols` it has an element for several
  // rows of x, and no axis for a row's.
  const void* broadcast_operand(const char* name, const RowShapes& rows, std::optional<int64_t> cols,
                                ffi::DataType type, BroadcastRows* map) {
    const auto buffer = operands_.get<ffi::AnyBuffer>(next_operand_);
    Shape shape = rows.statistics;
    if (buffer) {
      Shape came = shape_of(*buffer);
      if (!cols) came.push_back(1);
      if (const auto found = broadcast_rows_of(rows, came)) {
        *map = *found;
        shape = came;
      }
    }
    if (!cols && !shape.empty()) shape.pop_back();
    if (cols && !shape.empty()) shape.back() = *cols;
    return plain_operand(name, shape, type);
  }

  // Scale or bias: the first that comes says which row of the weights goes with which row of x.
  Input weight(const char* name, RowShapes& rows) {
    if (const auto buffer = operands_.get<ffi::AnyBuffer>(next_operand_)) rows.adopt(shape_of(*buffer));
    return operand(name, rows.weight);
  }

  Output weight_result(const char* name, RowShapes& rows, std::optional<Dtype> dtype = std::nullopt) {
    if (auto buffer = results_.get<ffi::AnyBuffer>(next_result_)) rows.adopt(shape_of(**buffer));
    return result(name, rows.weight, dtype);
  }

  // An array of x's shape, but that its rows may be further apart where one axis is normalised.
  Input padded_operand(const char* name, const RowShapes& rows, int64_t* stride) {
    const auto buffer = operands_.get<ffi::AnyBuffer>(next_operand_);
    return operand(name, padded(buffer ? shape_of(*buffer) : rows.x, rows, stride));
  }

  Output padded_result(const char* name, const RowShapes& rows, int64_t* stride) {
    auto buffer = results_.get<ffi::AnyBuffer>(next_result_);
    return result(name, padded(buffer ? shape_of(**buffer) : rows.x, rows, stride));
  }

  // Whether a result of this shape, or another that is not the workspace, comes next.
  bool has_result(const Shape& shape) const {
    const size_t left = results_.size() - std::min(results_.size(), next_result_);
    if (left != 1 || !has_workspace_) return left > 0;
    return !is_workspace() || shape_of(**results_.get<ffi::AnyBuffer>(next_result_)) == shape;
  }

  // The last result, of f32 and rank 1, where there is one.
  Workspace workspace() {
    if (!has_workspace_ || next_result_ + 1 != results_.size() || !is_workspace()) return {};
    auto buffer = *results_.get<ffi::AnyBuffer>(next_result_++);
    return {static_cast<float*>(buffer->untyped_data()), buffer->dimensions()[0]};
  }

  void require(bool condition, const char* message) {
    if (!condition) fail(message);
  }

  void fail(std::string message) {
    if (error_.empty()) error_ = std::move(message);
  }

  // Once everything is read: what was wrong, or that there is something else.
  ffi::Error finish() {
    check_count("attributes", attributes_.size(), attributes_read_);
    check_count("operands", operands_.size(), next_operand_);
    check_count("results", results_.size(), next_result_,
                has_workspace_
                    ? ", or one more, a workspace, if that is F32 of rank 1: a program that another version of "
                      "jaxnorm exported is to be exported again"
                    : "");
    if (error_.empty()) return ffi::Error::Success();
    return ffi::Error::InvalidArgument(std::string(target_) + ": " + error_);
  }

 private:
  // The dtypes of which any will do, and what messages call them.
  struct Dtypes {
    bool (*has)(Dtype);
    const char* names;
  };
  static constexpr Dtypes kWide{[](Dtype dtype) { return !is_quantized(dtype); }, "F32, F16 or BF16"};
  static constexpr Dtypes kQuantized{is_quantized, "F8E4M3FN, F8E5M2 or S8"};
  static constexpr Dtypes kFloat8{[](Dtype dtype) { return is_quantized(dtype) && dtype != Dtype::s8; },
                                  "F8E4M3FN or F8E5M2"};

  // The next one, or an error where there is none.
  std::optional<ffi::AnyBuffer> take_operand(const char* name) {
    if (const auto buffer = operands_.get<ffi::AnyBuffer>(next_operand_++)) return *buffer;
    return fail_missing(name, "operands", operands_.size()), std::nullopt;
  }
  std::optional<ffi::AnyBuffer> take_result(const char* name) {
    if (auto buffer = results_.get<ffi::AnyBuffer>(next_result_++)) return **buffer;
    return fail_missing(name, "results", results_.size()), std::nullopt;
  }

  Input operand(const char* name, const Shape& shape, std::optional<Dtype> dtype, const Dtypes& any) {
    const auto buffer = take_operand(name);
    return buffer ? Input{buffer->untyped_data(), checked(name, *buffer, shape, dtype, any)} : Input{};
  }
  Output result(const char* name, const Shape& shape, std::optional<Dtype> dtype, const Dtypes& any) {
    const auto buffer = take_result(name);
    return buffer ? Output{buffer->untyped_data(), checked(name, *buffer, shape, dtype, any)} : Output{};
  }

  const void* plain_operand(const char* name, const Shape& shape, ffi::DataType type) {
    return plain(name, take_operand(name), shape, type);
  }
  void* plain_result(const char* name, const Shape& shape, ffi::DataType type) {
    return plain(name, take_result(name), shape, type);
  }

  void* plain(const char* name, const std::optional<ffi::AnyBuffer>& buffer, const Shape& shape, ffi::DataType type) {
    if (!buffer) return nullptr;
    if (buffer->element_type() != type || shape_of(*buffer) != shape) {
      std::ostringstream expected;
      expected << type << text(shape);
      fail(std::string(name) + " is " + text(*buffer) + ", expected " + expected.str());
    }
    return buffer->untyped_data();
  }

  // Whether the last result may be the workspace.
  bool is_workspace() const {
    auto last = *results_.get<ffi::AnyBuffer>(results_.size() - 1);
    return last->element_type() == ffi::F32 && last->dimensions().size() == 1;
  }

  static Shape padded(const Shape& came, const RowShapes& rows, int64_t* stride) {
    Shape shape = rows.x;
    *stride = rows.cols;
    if (rows.axes != 1 || came.size() != shape.size()) return shape;
    return shape.back() = *stride = std::max(rows.cols, came.back()), shape;
  }

  Dtype checked(const char* name, const ffi::AnyBuffer& buffer, const Shape& shape, std::optional<Dtype> wanted,
                const Dtypes& any) {
    const auto dtype = dtype_of(buffer);
    const bool is_right = dtype && (wanted ? *dtype == *wanted : any.has(*dtype));
    if (shape_of(buffer) != shape || !is_right) {
      const std::string expected = wanted ? name_of(*wanted) : std::string(any.names) + " of shape ";
      fail(std::string(name) + " is " + text(buffer) + ", expected " + expected + text(shape));
    }
    return dtype.value_or(Dtype::f32);
  }

  void check_count(const char* what, size_t came, size_t expected, const char* remark = "") {
    if (came == expected) return;
    fail(std::string("number of ") + what + " is " + std::to_string(came) + ", expected " + std::to_string(expected) +
         remark);
  }

  void fail_missing(const char* name, const char* what, size_t came) {
    fail(std::string(name) + " is missing, " + what + " that came: " + std::to_string(came));
  }

  const char* target_;
  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  ffi::Dictionary attributes_;
  bool has_workspace_;
  size_t attributes_read_ = 0, next_operand_ = 0, next_result_ = 0;
  std::string error_;
};

}  // namespace jaxnorm
