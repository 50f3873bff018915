// The table of the norms, and the readers of rows that are gated and quantised, or sharded over devices.
#pragma once

#include "ffi/table.h"
#include "ops/norm/call.h"
#include "ops/norm/gated_quantized.h"
#include "ops/norm/read_gated.h"
#include "ops/norm/read_plain.h"
#include "ops/norm/read_quantized.h"

namespace jaxnorm {

inline GatedNormQuantizedForward read_gated_norm_quantized(Reader& in) {
  GatedNormQuantizedForward p{};
  p.kind = Kind::rms;
  const RowShapes rows = read_gated_operands(in, p);
  read_quantization(in, rows, p.quantized);
  if (in.has_result(rows.statistics)) p.rstd = in.f32_result("rstd", rows.statistics);
  return p;
}

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

namespace ops::norm {

template <class Platform>
inline constexpr std::tuple kTable{
    Row{"jaxnorm_rms_norm_fwd", read_norm<Kind::rms>, Platform::workspace(cuda::norm_workspace<Kind::rms>)},
    Row{"jaxnorm_layer_norm_fwd", read_norm<Kind::layer>, Platform::workspace(cuda::norm_workspace<Kind::layer>)},
    Row{"jaxnorm_rms_norm_quantized_fwd", read_quantized_norm<Kind::rms>},
    Row{"jaxnorm_layer_norm_quantized_fwd", read_quantized_norm<Kind::layer>},
    Row{"jaxnorm_gated_rms_norm_fwd", read_gated_norm},
    Row{"jaxnorm_gated_rms_norm_quantized_fwd", read_gated_norm_quantized},
    Row{"jaxnorm_rms_norm_bwd", read_norm_grad<Kind::rms>, Platform::workspace(cuda::norm_grad_workspace)},
    Row{"jaxnorm_layer_norm_bwd", read_norm_grad<Kind::layer>, Platform::workspace(cuda::norm_grad_workspace)},
    Row{"jaxnorm_gated_rms_norm_bwd", read_gated_norm_grad, Platform::workspace(cuda::gated_norm_grad_workspace)},
    CudaRow{"jaxnorm_rms_norm_statistics", read_shard_statistics<Kind::rms>},
    CudaRow{"jaxnorm_layer_norm_statistics", read_shard_statistics<Kind::layer>},
    CudaRow{"jaxnorm_rms_norm_apply", read_shard_apply<Kind::rms>},
    CudaRow{"jaxnorm_layer_norm_apply", read_shard_apply<Kind::layer>},
    Limit{"per_head_cols", kPerHeadCols},
    Limit{"gated_cols", kGatedCols},
    Limit{"groups", kGroups},
    Limit{"smallest_scale", kSmallestScale},
};

}  // namespace ops::norm

}  // namespace jaxnorm
