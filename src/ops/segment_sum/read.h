// The reader of sums of segments. data has the shape (positions, columns).
#pragma once

#include "ffi/table.h"
#include "ops/segment_sum/call.h"

namespace jaxnorm {

inline SegmentSum read_segment_sum(Reader& in) {
  Shape data = in.operand_shape("data", 0);
  in.require(data.size() == 2 && data[0] <= kMostSegments, "data is no matrix, or has more rows than kernels count");
  data.resize(2);
  SegmentSum p{};
  p.positions = static_cast<int32_t>(data[0]), p.cols = data[1];
  p.data = in.operand("data", data);
  p.ids = in.i32_operand("ids", {data[0]});
  if (in.flag("has_order")) p.order = in.i32_operand("order", {data[0]});
  const int64_t segments = in.attribute<int64_t>("segments");
  in.require(segments >= 0 && segments <= kMostSegments, "segments is no length, or more than kernels count");
  p.segments = static_cast<int32_t>(segments);
  p.is_added = in.later_flag("has_onto");
  if (p.is_added) p.onto = in.operand("onto", {segments, p.cols});
  const Shape sums{segments, p.cols};
  p.sums = p.is_added ? in.result("sums", sums, p.onto.dtype) : in.result("sums", sums);
  p.workspace = in.workspace();
  return p;
}

namespace ops::segment_sum {

template <class Platform>
inline constexpr std::tuple kTable{
    Row{"jaxnorm_segment_sum", read_segment_sum, Platform::workspace(cuda::segment_sum_workspace)},
};

}  // namespace ops::segment_sum

}  // namespace jaxnorm
