// The reader of what is rounded.
#pragma once

#include "ffi/table.h"
#include "ops/quantize/call.h"
#include "ops/shared/read.h"

namespace jaxnorm {

inline QuantizeForward read_quantize(Reader& in) {
  const RowShapes rows = in.rows(in.attribute<int64_t>("axes"));
  QuantizeForward p{};
  p.x = in.operand("x", rows.x);
  read_quantization(in, rows, p.quantized);
  in.require(!p.quantized.given && !p.quantized.smooth, "a scale or smooth factors are given, which no kernel takes");
  p.cols = p.quantized.group;
  p.rows = p.cols > 0 ? rows.rows * (rows.cols / p.cols) : 0;
  return p;
}

namespace ops::quantize {

template <class Platform>
inline constexpr std::tuple kTable{Row{"jaxnorm_quantize_fwd", read_quantize}};

}  // namespace ops::quantize

}  // namespace jaxnorm
