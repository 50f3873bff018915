// Rows of logits: which columns count, and z = x * scale, or z = soft_cap * tanh(x * scale / soft_cap).
//
// Only differences of logits count, and these are to be exact however large the logits are. So z is never formed, but a
// w that is not rounded, of which z = w * unit: a difference of logits is (w - w') * unit.
//
//   w = x * power      without a soft cap; power is a power of two of the scale's sign
//   w = z, unit = 1    with one
//
// The top of a row is the largest w that counts, and no less than -FLT_MAX; of a row where none does it is -inf. What
// is relative to it is relative to 0 then: see origin_of. So a shard of a row that is -inf throughout is as any other.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "operands.h"

namespace jaxnorm {

// Which columns of a row count.
struct Mask {
  const uint8_t* where = nullptr;  // a byte for each column, 0 where it does not count; null: all do
  BroadcastRows where_rows;
  const int32_t* lengths = nullptr;  // of a row the columns before lengths[row] count; null: all do
  BroadcastRows lengths_rows;
  // Of rows with a window, which have lengths, only the columns from max(lengths[row], 0) - window on count, or in
  // programs of before, which have starts, those from starts[row] on.
  const int32_t* starts = nullptr;
  union {
    int32_t window = 0;  // without starts
    BroadcastRows starts_rows;
  };
  bool has_window() const { return starts || window > 0; }
  explicit operator bool() const { return where || lengths; }
};

struct Scale {
  float whole = 1, power = 1, unit = 1;  // unit: |whole| / |power|, from 1 to 2, or 0

  Scale() = default;
  Scale(float scale) : whole(scale) {
    int exponent;
    if (std::frexp(std::fabs(scale), &exponent) == 0) {
      unit = 0;
    } else {
      power = std::copysign(std::ldexp(1.0f, std::max(exponent - 1, -126)), scale);
      unit = scale / power;
    }
  }
};

}  // namespace jaxnorm
