// The readers of what ops share: an activation, a mask, and how a result is quantised.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <string>
#include <string_view>

#include "ffi/reader.h"
#include "ops/shared/activation.h"
#include "ops/shared/logits.h"
#include "ops/shared/quantization.h"

namespace jaxnorm {

// One of those that the op knows.
inline Activation read_activation(Reader& in, std::initializer_list<Activation> known) {
  const auto name = in.attribute<std::string_view>("activation");
  std::string names;
  for (const Activation activation : known) {
    if (name == name_of(activation)) return activation;
    names += std::string(names.empty() ? "" : ", ") + name_of(activation);
  }
  in.fail("activation is none of " + names);
  return *known.begin();
}

inline void read_where_operand(Reader& in, const RowShapes& rows, Mask& mask) {
  mask.where = static_cast<const uint8_t*>(in.broadcast_operand("where", rows, rows.cols, ffi::PRED, &mask.where_rows));
}

inline void read_where(Reader& in, const RowShapes& rows, Mask& mask) {
  if (in.flag("has_where")) read_where_operand(in, rows, mask);
}

inline void read_lengths(Reader& in, const RowShapes& rows, Mask& mask) {
  if (!in.flag("has_lengths")) return;
  mask.lengths = static_cast<const int32_t*>(in.broadcast_operand("lengths", rows, 1, ffi::S32, &mask.lengths_rows));
}

// Where the columns that count begin: programs of before have an array of that, others one number for all rows.
inline void read_window(Reader& in, const RowShapes& rows, Mask& mask) {
  if (in.later_flag("has_starts")) {
    mask.starts_rows = {};
    mask.starts = static_cast<const int32_t*>(in.broadcast_operand("starts", rows, 1, ffi::S32, &mask.starts_rows));
  }
  if (in.has_attribute("window")) {
    const int64_t window = in.attribute<int64_t>("window");
    in.require(window > 0 && window <= INT32_MAX, "window is not positive, or more than kernels count");
    in.require(!mask.starts, "there are starts beside a window");
    mask.window = static_cast<int32_t>(window);
  }
  in.require(!mask.has_window() || mask.lengths, "there are starts or a window, but no lengths");
}

// group: how many neighbouring columns share a scale; 0: all of a row.
inline void check_group(Reader& in, const RowShapes& rows, int64_t group, bool has_given) {
  if (group == 0) return;
  const bool is_known = std::find(std::begin(kGroups), std::end(kGroups), group) != std::end(kGroups);
  if (!is_known) return in.fail("group is " + std::to_string(group) + ", expected 32, 64, 128 or, for a row, 0");
  in.require(rows.axes == 1 && rows.cols % group == 0,
             "the last axis is not the only one that is normalised, or group does not divide it");
  in.require(!has_given, "there are groups and their scale is given");
}

// How y of such rows is quantised: attributes, then the operands and results that come of them.
inline void read_quantization(Reader& in, const RowShapes& rows, Quantization& q) {
  const bool has_given = in.flag("has_given");
  const int64_t group = in.attribute<int64_t>("group");
  check_group(in, rows, group, has_given);
  q.group = group == 0 ? rows.cols : group;
  q.max_scale = in.attribute<float>("max_scale");
  in.require(q.max_scale >= kSmallestScale, "max_scale is below the smallest normal float");
  q.power_of_two = in.flag("power_of_two");
  if (in.flag("has_smooth")) q.smooth = in.operand("smooth_scale", rows.weight);
  if (has_given) q.given = in.f32_operand("static_scale", {});
  q.values = in.quantized_result("values", rows.x);
  if (has_given) return;
  Shape scales = rows.statistics;
  if (group != 0 && !scales.empty()) scales.back() = rows.cols / q.group;
  q.scales = in.f32_result("scales", scales);
}

}  // namespace jaxnorm
