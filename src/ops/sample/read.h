// The reader of sample. What has a number a row has the shape of the logits, but a last axis of 1.
#pragma once

#include "ffi/table.h"
#include "ops/sample/call.h"
#include "ops/shared/read.h"

namespace jaxnorm {

inline Sample read_sample(Reader& in) {
  Sample p{};
  const RowShapes rows = in.rows(p, 1);
  in.require(rows.cols <= kMostColumns, "a row has more columns than kernels count");
  p.logits = in.operand("logits", rows.x);
  p.uniform = in.f32_operand("uniform", rows.statistics);
  p.temperature = in.f32_operand("temperature", rows.statistics);
  if (in.flag("has_top_k")) p.top_k = in.i32_operand("top_k", rows.statistics);
  if (in.flag("has_top_p")) p.top_p = in.f32_operand("top_p", rows.statistics);
  if (in.flag("has_min_p")) p.min_p = in.f32_operand("min_p", rows.statistics);
  read_where(in, rows, p.mask);
  p.ids = in.i32_result("ids", rows.statistics);
  p.log_probs = in.f32_result("log_probs", rows.statistics);
  return p;
}

namespace ops::sample {

template <class Platform>
inline constexpr std::tuple kTable{Row{"jaxnorm_sample_fwd", read_sample}};

}  // namespace ops::sample

}  // namespace jaxnorm
