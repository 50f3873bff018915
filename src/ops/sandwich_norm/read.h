// The readers of the sandwich norm, whose rows are those of x's last axis.
#pragma once

#include "ffi/table.h"
#include "ops/sandwich_norm/call.h"

namespace jaxnorm {

inline constexpr const char* kUnlikeNormed = "x and the residual have different dtypes and neither is F32";

inline SandwichNormForward read_sandwich_norm(Reader& in) {
  SandwichNormForward p{};
  const RowShapes rows = in.rows(p, 1);
  p.epsilon = in.attribute<float>("epsilon");
  p.scale_offset = in.attribute<float>("scale_offset");
  p.multiply_before_cast = in.flag("multiply_before_cast");
  p.x = in.operand("x", rows.x);
  p.addend = in.operand("residual", rows.x);
  in.require(is_supported(p.x.dtype, p.addend.dtype), kUnlikeNormed);
  if (in.flag("has_post_scale")) p.post_scale = in.operand("post_scale", rows.weight);
  if (in.flag("has_scale")) p.scale = in.operand("scale", rows.weight);
  p.y = in.result("y", rows.x, p.x.dtype);
  p.sum = in.result("new_residual", rows.x, p.addend.dtype);
  if (in.has_result(rows.statistics)) {
    p.post_rstd = in.f32_result("post_rstd", rows.statistics);
    p.rstd = in.f32_result("rstd", rows.statistics);
  }
  p.workspace = in.workspace();
  return p;
}

inline SandwichNormBackward read_sandwich_norm_grad(Reader& in) {
  SandwichNormBackward p{};
  const RowShapes rows = in.rows(p, 1, 1);
  const bool has_post_scale = in.flag("has_post_scale"), has_scale = in.flag("has_scale");
  const bool with_dpost_scale = in.flag("with_dpost_scale"), with_dscale = in.flag("with_dscale");
  p.scale_offset = in.attribute<float>("scale_offset");
  p.dy = in.operand("dy", rows.x);
  p.x = in.operand("x", rows.x, p.dy.dtype);
  p.sum = in.operand("new_residual", rows.x);
  in.require(is_supported(p.x.dtype, p.sum.dtype), kUnlikeNormed);
  p.post_rstd = in.f32_operand("post_rstd", rows.statistics);
  p.rstd = in.f32_operand("rstd", rows.statistics);
  if (has_post_scale) p.post_scale = in.operand("post_scale", rows.weight);
  if (has_scale) p.scale = in.operand("scale", rows.weight);
  if (in.flag("has_dnew_residual")) p.dsum = in.operand("dnew_residual", rows.x, p.sum.dtype);
  in.require(has_post_scale || !with_dpost_scale, "dpost_scale is wanted and there is no post_scale");
  in.require(has_scale || !with_dscale, "dscale is wanted and there is no scale");
  if (in.flag("with_dx")) p.dx = in.result("dx", rows.x, p.x.dtype);
  if (in.flag("with_dresidual")) p.daddend = in.result("dresidual", rows.x, p.sum.dtype);
  if (with_dpost_scale) p.dpost_scale = in.result("dpost_scale", rows.weight, p.post_scale.dtype);
  if (with_dscale) p.dscale = in.result("dscale", rows.weight, p.scale.dtype);
  p.workspace = in.workspace();
  return p;
}

namespace ops::sandwich_norm {

template <class Platform>
inline constexpr std::tuple kTable{
    Row{"jaxnorm_rms_norm_add_rms_norm_fwd", read_sandwich_norm, Platform::workspace(cuda::sandwich_norm_workspace)},
    Row{"jaxnorm_rms_norm_add_rms_norm_bwd", read_sandwich_norm_grad,
        Platform::workspace(cuda::sandwich_norm_grad_workspace)},
};

}  // namespace ops::sandwich_norm

}  // namespace jaxnorm
