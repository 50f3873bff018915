// The reader of the norms with a quantised result.
#pragma once

#include "ops/norm/quantized.h"
#include "ops/norm/read_plain.h"
#include "ops/shared/read.h"

namespace jaxnorm {

template <Kind kind>
ScaledAddQuantizedNormForward read_quantized_norm(Reader& in) {
  ScaledAddQuantizedNormForward p{};
  const bool has_addend = in.flag(called::kHasAddend);
  const RowShapes rows = read_norm_operands(in, kind, p, has_addend, /*has_weight_rows=*/false);
  RowShapes branch = in.rows(rows.axes);
  read_branch_scale(in, branch, has_addend, p.branch_scale, p.branch_rows);
  read_quantization(in, rows, p.quantized);
  if (in.later_flag("with_y")) p.y = in.result("y", rows.x, p.x.dtype);
  read_norm_results(in, rows, p, has_addend);
  return p;
}

}  // namespace jaxnorm
