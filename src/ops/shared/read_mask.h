// The readers of a mask: `where`, and the lengths and starts of rows.
#pragma once

#include "ffi/reader.h"
#include "ops/shared/mask.h"

namespace jaxnorm {

inline void read_where_operand(Reader& in, const RowShapes& rows, Mask& mask) {
  mask.where = static_cast<const uint8_t*>(in.broadcast_operand("where", rows, rows.cols, ffi::PRED, &mask.where_rows));
}

inline void read_where(Reader& in, const RowShapes& rows, Mask& mask) {
  if (in.flag("has_where")) read_where_operand(in, rows, mask);
}

inline void read_lengths(Reader& in, const RowShapes& rows, Mask& mask) {
  if (!in.flag("has_lengths")) return;
  mask.lengths = static_cast<const int32_t*>(in.broadcast_operand("lengths", rows, 1, ffi::S32, &mask.lengths_rows));
}

inline void read_starts(Reader& in, const RowShapes& rows, Mask& mask) {
  if (!in.later_flag("has_starts")) return;
  in.require(mask.lengths, "there are starts, but no lengths");
  mask.starts = static_cast<const int32_t*>(in.broadcast_operand("starts", rows, 1, ffi::S32, &mask.starts_rows));
}

}  // namespace jaxnorm
