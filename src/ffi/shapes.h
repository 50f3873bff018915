// XLA's buffers, their shapes and dtypes and how messages print them; and the shapes of rows, and of weights that
// differ between rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "operands.h"
#include "xla/ffi/api/ffi.h"

namespace jaxnorm {

namespace ffi = xla::ffi;

using Shape = std::vector<int64_t>;

inline Shape shape_of(const ffi::AnyBuffer& buffer) {
  return Shape(buffer.dimensions().begin(), buffer.dimensions().end());
}

inline std::optional<Dtype> dtype_of(const ffi::AnyBuffer& buffer) {
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

inline const char* name_of(Dtype dtype) {
  constexpr const char* names[] = {"F32", "F16", "BF16", "F8E4M3FN", "F8E5M2", "S8"};
  return names[static_cast<int>(dtype)];
}

inline std::string text(const Shape& shape) {
  std::string out;
  for (int64_t extent : shape) out += (out.empty() ? "" : ",") + std::to_string(extent);
  return "[" + out + "]";
}

inline std::string text(const ffi::AnyBuffer& buffer) {
  std::ostringstream out;
  out << buffer.element_type() << text(shape_of(buffer));
  return out.str();
}

// Which row of a weight of shape (lead..., normalised...) goes with which row of x. The lead is aligned to the right
// with x's other axes, each of its axes 1 or as long as x's. Nothing where it has another shape, or no RowMap describes
// it.
inline std::optional<RowMap> weight_rows_of(const Shape& x, const Shape& weight, int64_t axes) {
  const int64_t rank = weight.size(), lead = rank - axes, before = static_cast<int64_t>(x.size()) - rank;
  if (lead < 0 || before < 0 || !std::equal(weight.end() - axes, weight.end(), x.end() - axes)) return std::nullopt;
  RowMap weight_rows;
  bool is_over = false;  // the axes along which the weights differ
  for (int64_t axis = lead - 1; axis >= 0; --axis) {
    const int64_t weight_extent = weight[axis], x_extent = x[before + axis];
    const bool differ = weight_extent != 1;
    if (weight_extent < 1 || (differ && (weight_extent != x_extent || is_over))) return std::nullopt;
    if (differ) weight_rows.count *= weight_extent;
    if (!differ && x_extent != 1) {
      if (weight_rows.count == 1) weight_rows.inner *= x_extent;
      is_over = weight_rows.count > 1;
    }
  }
  if (weight_rows.count == 1) return RowMap{};
  weight_rows.inner = std::max<int64_t>(1, weight_rows.inner);
  return weight_rows;
}

// What follows from the shape of x and the number of normalised axes; `weight` and `weight_rows` from the first weight
// too.
struct RowShapes {
  Shape x, statistics, weight;
  int64_t axes = 0, rows = 1, cols = 1;
  RowMap weight_rows;
  bool has_weight = false;

  // Makes the shape of a weight that of the first that comes, if a kernel takes it.
  void adopt(const Shape& first_weight) {
    if (has_weight) return;
    has_weight = true;
    const auto map = weight_rows_of(x, first_weight, axes);
    if (!map || (map->count > 1 && cols > kPerHeadCols)) return;
    weight = first_weight;
    weight_rows = *map;
  }
};

// Which row of an operand of x's rank goes with which row of x, where one axis is a row's: along each of the others it
// is 1 long or as long as x, and there are at most two runs of axes along which its rows differ. Else nothing.
inline std::optional<BroadcastRows> broadcast_rows_of(const RowShapes& rows, const Shape& shape) {
  if (rows.axes != 1 || shape.size() != rows.x.size()) return std::nullopt;
  BroadcastRows map;
  RowMap* run = &map.inner;
  bool is_over = false;    // whether a run has ended
  int64_t neighbours = 1;  // rows of x for which all axes before are the same
  for (int64_t axis = static_cast<int64_t>(shape.size()) - 2; axis >= 0; --axis) {
    const int64_t extent = shape[axis], of_x = rows.x[axis];
    if (extent != 1 && extent != of_x) return std::nullopt;
    if (extent != 1) {
      if (is_over) {
        if (run == &map.outer) return std::nullopt;
        run = &map.outer;
        is_over = false;
      }
      if (run->count == 1) run->inner = neighbours;
      run->count *= extent;
    } else if (of_x != 1) {
      is_over = run->count > 1;
    }
    neighbours *= of_x;
  }
  // Of an array without rows nothing is read.
  for (RowMap* each : {&map.outer, &map.inner})
    *each = {std::max<int64_t>(1, each->count), std::max<int64_t>(1, each->inner)};
  return map;
}

}  // namespace jaxnorm
