// The readers of the norms of rows that are sharded over devices.
#pragma once

#include "ffi/norm.h"
#include "ops/norm_shard.h"

namespace jaxnorm {

template <Kind kind>
ShardStatistics read_shard_statistics(Reader& in) {
  const RowShapes rows = in.rows(in.attribute<int64_t>("axes"));
  ShardStatistics p{};
  p.kind = kind;
  p.rows = rows.rows;
  p.cols = rows.cols;
  p.x = in.operand("x", rows.x);
  if (kind == Kind::layer) p.mean = in.f32_result("mean", rows.statistics);
  p.variance = in.f32_result(kind == Kind::rms ? "mean_square" : "variance", rows.statistics);
  return p;
}

template <Kind kind>
ShardApply read_shard_apply(Reader& in) {
  const RowShapes rows = in.rows(in.attribute<int64_t>("axes"));
  ShardApply p{};
  p.kind = kind;
  p.rows = rows.rows;
  p.cols = rows.cols;
  p.scale_offset = in.attribute<float>("scale_offset");
  p.multiply_before_cast = in.flag("multiply_before_cast");
  p.x = in.operand("x", rows.x);
  if (kind == Kind::layer) p.mean = in.f32_operand("mean", rows.statistics);
  p.rstd = in.f32_operand("rstd", rows.statistics);
  if (in.flag("has_scale")) p.scale = in.operand("scale", rows.weight);
  if (in.flag("has_bias")) p.bias = in.operand("bias", rows.weight);
  p.y = in.result("y", rows.x);
  in.require(is_supported(p.x.dtype, p.y.dtype), kPair);
  return p;
}

}  // namespace jaxnorm
