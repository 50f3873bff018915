// The readers of softmax and log-softmax.
#pragma once

#include "ffi/table.h"
#include "ops/shared/read.h"
#include "ops/softmax/call.h"

namespace jaxnorm {

template <bool LOG>
SoftmaxForward read_softmax(Reader& in) {
  SoftmaxForward p{};
  const RowShapes rows = in.rows(p, 1);
  p.log = LOG;
  const bool with_top = LOG && in.later_flag("with_top");
  p.scale = in.attribute<float>("scale");
  p.x = in.operand("x", rows.x);
  read_where(in, rows, p.mask);
  read_lengths(in, rows, p.mask);
  read_window(in, rows, p.mask);
  p.y = in.result("y", rows.x);
  in.require(is_supported(p.x.dtype, p.y.dtype), "x and y have different dtypes and neither is F32");
  if (LOG && in.has_result(rows.statistics)) {
    p.log_sum = in.f32_result("log_sum", rows.statistics);
    if (with_top) p.top = in.f32_result("top", rows.statistics);
  }
  p.workspace = in.workspace();
  return p;
}

inline SoftmaxBackward read_softmax_grad(Reader& in) {
  SoftmaxBackward p{};
  const RowShapes rows = in.rows(p, 1, 1);
  p.scale = in.attribute<float>("scale");
  in.require(in.flag("with_dx"), "dx is not wanted");
  p.dy = in.operand("dy", rows.x);
  p.y = in.operand("y", rows.x, p.dy.dtype);
  read_lengths(in, rows, p.mask);
  if (in.later_flag("has_where")) read_where_operand(in, rows, p.mask);
  read_window(in, rows, p.mask);
  p.dx = in.result("dx", rows.x);
  in.require(is_supported(p.dy.dtype, p.dx.dtype), "dy and dx have different dtypes and neither is F32");
  return p;
}

inline LogSoftmaxBackward read_log_softmax_grad(Reader& in) {
  LogSoftmaxBackward p{};
  const RowShapes rows = in.rows(p, 1, 1);
  p.scale = in.attribute<float>("scale");
  in.require(in.flag("with_dx"), "dx is not wanted");
  p.dy = in.operand("dy", rows.x);
  p.x = in.operand("x", rows.x);
  in.require(is_supported(p.dy.dtype, p.x.dtype), "dy and x have different dtypes and neither is F32");
  p.log_sum = in.f32_operand("log_sum", rows.statistics);
  if (in.later_flag("with_top")) p.top = in.f32_operand("top", rows.statistics);
  read_where(in, rows, p.mask);
  read_lengths(in, rows, p.mask);
  read_window(in, rows, p.mask);
  p.dx = in.result("dx", rows.x, p.x.dtype);
  return p;
}

namespace ops::softmax {

template <class Platform>
inline constexpr std::tuple kTable{
    Row{"jaxnorm_softmax_fwd", read_softmax<false>, Platform::workspace(cuda::softmax_workspace)},
    Row{"jaxnorm_log_softmax_fwd", read_softmax<true>, Platform::workspace(cuda::softmax_workspace)},
    Row{"jaxnorm_softmax_bwd", read_softmax_grad},
    Row{"jaxnorm_log_softmax_bwd", read_log_softmax_grad},
};

}  // namespace ops::softmax

}  // namespace jaxnorm
