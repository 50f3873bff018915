// Which columns of a row count.
#pragma once

#include "operands.h"

namespace jaxnorm {

// Row r of x goes with row of(r) of an operand that has one row for several of x, along any two runs of x's leading
// axes: `outer` and `inner` say which, each as a RowMap.
struct BroadcastRows {
  RowMap outer, inner;
};

struct Mask {
  const uint8_t* where = nullptr;  // a byte for each column, 0 where it does not count; null: all do
  BroadcastRows where_rows;
  const int32_t* lengths = nullptr;  // of a row the columns before lengths[row] count; null: all do
  BroadcastRows lengths_rows;
  const int32_t* starts = nullptr;  // and of these the columns from starts[row] on; null: all do, as without lengths
  BroadcastRows starts_rows;
  explicit operator bool() const { return where || lengths; }
};

}  // namespace jaxnorm
