// The readers of what a linear layer in float8 rounds.
#pragma once

#include "ffi/table.h"
#include "ops/float8_linear/call.h"

namespace jaxnorm {

// x (..., columns), and a factor for each column.
inline RoundRows read_round_rows(Reader& in) {
  RoundRows p{};
  const RowShapes rows = in.rows(p, 1);
  p.power_of_two = in.flag("power_of_two");
  p.x = in.operand("x", rows.x);
  if (in.flag("has_factors")) p.factors = in.f32_operand("factors", {rows.cols});
  p.values = in.result("values", rows.x, Dtype::f8e4m3fn);
  p.scales = in.f32_result("scales", rows.statistics);
  return p;
}

inline Shape read_matrix_shape(Reader& in) {
  Shape x = in.operand_shape("x", 0);
  in.require(x.size() == 2, "x is no matrix");
  x.resize(2);
  return x;
}

inline RoundColumns read_round_columns(Reader& in) {
  const Shape x = read_matrix_shape(in);
  RoundColumns p{};
  p.rows = x[0], p.cols = x[1];
  in.require(p.rows > 0 && p.cols > 0, "x is empty");
  p.power_of_two = in.flag("power_of_two");
  p.x = in.operand("x", x);
  if (in.flag("with_values")) p.values = in.result("values", x, Dtype::f8e4m3fn);
  p.transposed = in.result("transposed", {p.cols, p.rows}, Dtype::f8e4m3fn);
  p.scales = in.f32_result("scales", {1, p.cols});
  p.workspace = in.workspace();
  return p;
}

// dy (..., columns), a factor for each column, which counts by rows, and one for each row.
inline RoundGradient read_round_gradient(Reader& in) {
  RoundGradient p{};
  const RowShapes rows = in.rows(p, 1);
  in.require(p.rows > 0 && p.cols > 0, "dy is empty");
  p.power_of_two = in.flag("power_of_two");
  p.x = in.operand("dy", rows.x);
  if (in.flag("has_factors_of_columns")) p.of_columns = in.f32_operand("factors_of_columns", {rows.cols});
  if (in.flag("has_factors_of_rows")) p.of_rows = in.f32_operand("factors_of_rows", {rows.rows});
  if (in.flag("with_values")) {
    p.values = in.result("values", rows.x, Dtype::f8e4m3fn);
    p.scales = in.f32_result("scales", rows.statistics);
  }
  p.transposed = in.result("transposed", {p.cols, p.rows}, Dtype::f8e4m3fn);
  p.column_scales = in.f32_result("column_scales", {1, p.cols});
  p.workspace = in.workspace();
  return p;
}

inline TransposeBytes read_transpose_bytes(Reader& in) {
  const Shape x = read_matrix_shape(in);
  TransposeBytes p{};
  p.rows = x[0], p.cols = x[1];
  p.x = static_cast<const uint8_t*>(in.operand("x", x, Dtype::f8e4m3fn).data);
  p.y = static_cast<uint8_t*>(in.result("y", {p.cols, p.rows}, Dtype::f8e4m3fn).data);
  return p;
}

namespace ops::float8_linear {

template <class Platform>
inline constexpr std::tuple kTable{
    CudaRow{"jaxnorm_round_rows", read_round_rows},
    CudaRow{"jaxnorm_round_columns", read_round_columns, Platform::workspace(cuda::round_columns_workspace)},
    CudaRow{"jaxnorm_round_gradient", read_round_gradient, Platform::workspace(cuda::round_columns_workspace)},
    CudaRow{"jaxnorm_transpose_bytes", read_transpose_bytes},
};

}  // namespace ops::float8_linear

}  // namespace jaxnorm
