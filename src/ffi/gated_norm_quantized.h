// The reader of gated RMSNorm with a quantised result.
#pragma once

#include "ffi/gated_norm.h"
#include "ffi/quantized_norm.h"
#include "ops/gated_norm_quantized.h"

namespace jaxnorm {

inline GatedNormQuantizedForward read_gated_norm_quantized(Reader& in) {
  GatedNormQuantizedForward p{};
  p.kind = Kind::rms;
  const RowShapes rows = read_gated_operands(in, p);
  read_quantization(in, rows, p.quantized);
  if (in.has_result(rows.statistics)) p.rstd = in.f32_result("rstd", rows.statistics);
  return p;
}

}  // namespace jaxnorm
