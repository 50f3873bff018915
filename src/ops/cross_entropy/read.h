// The readers of cross-entropy with integer labels.
#pragma once

#include <type_traits>

#include "ffi/table.h"
#include "ops/cross_entropy/call.h"
#include "ops/shared/read.h"

namespace jaxnorm {

// x is the operand of this index.
template <class Op>
RowShapes read_logits(Reader& in, Op& p, size_t x_index) {
  const RowShapes rows = in.rows(p, 1, x_index);
  p.scale = in.attribute<float>("scale");
  p.soft_cap = in.attribute<float>("soft_cap");
  if constexpr (std::is_same_v<Op, CrossEntropyBackward>) p.dlog_sum = in.f32_operand("dlog_sum", rows.statistics);
  p.x = in.operand("x", rows.x);
  p.labels = in.i32_operand("labels", rows.statistics);
  if constexpr (std::is_same_v<Op, CrossEntropyBackward>) p.log_sum = in.f32_operand("log_sum", rows.statistics);
  read_where(in, rows, p.mask);
  if constexpr (std::is_same_v<Op, CrossEntropyBackward>)
    if (in.later_flag("has_top")) p.top = in.f32_operand("top", rows.statistics);
  return rows;
}

inline CrossEntropyForward read_cross_entropy(Reader& in) {
  CrossEntropyForward p{};
  const RowShapes rows = read_logits(in, p, 0);
  p.log_sum = in.f32_result("log_sum", rows.statistics);
  p.label_logit = in.f32_result("label_logit", rows.statistics);
  if (in.flag("with_total")) p.total = in.f32_result("total", rows.statistics);
  if (in.later_flag("with_top")) p.top = in.f32_result("top", rows.statistics);
  return p;
}

inline CrossEntropyBackward read_cross_entropy_grad(Reader& in) {
  CrossEntropyBackward p{};
  const RowShapes rows = read_logits(in, p, 1);
  in.require(in.flag("with_dx"), "dx is not wanted");
  if (in.flag("has_dlabel_logit")) p.dlabel_logit = in.f32_operand("dlabel_logit", rows.statistics);
  if (in.flag("has_dtotal")) p.dtotal = in.f32_operand("dtotal", rows.statistics);
  if (in.later_flag("has_dtop")) in.f32_operand("dtop", rows.statistics);  // no loss depends on it
  p.dx = in.result("dx", rows.x, p.x.dtype);
  return p;
}

namespace ops::cross_entropy {

template <class Platform>
inline constexpr std::tuple kTable{
    Row{"jaxnorm_cross_entropy_fwd", read_cross_entropy},
    Row{"jaxnorm_cross_entropy_bwd", read_cross_entropy_grad},
};

}  // namespace ops::cross_entropy

}  // namespace jaxnorm
