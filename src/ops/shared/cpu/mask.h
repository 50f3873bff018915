// Which columns of a row count.
#pragma once

#include "engine/cpu/vector.h"
#include "ops/shared/mask.h"

namespace jaxnorm::cpu {
namespace {

// All bits of a lane, where it lies within the row.
Bits lanes(Part part) {
  uint32_t index[W];
  for (int i = 0; i < W; ++i) index[i] = i;
  Bits lane;
  memcpy(&lane, index, sizeof lane);
  return (Bits)(lane < static_cast<uint32_t>(part.count));
}

// All bits of a lane, where a byte is not 0.
Bits lanes(const uint8_t* p, Whole) {
  Bytes bytes;
  memcpy(&bytes, p, sizeof bytes);
  return (Bits)(__builtin_convertvector(bytes, Bits) != 0);
}
Bits lanes(const uint8_t* p, Part part) {
  uint8_t bytes[W] = {};
  memcpy(bytes, p, part.count);
  return lanes(bytes, Whole{});
}

int64_t row_of(const BroadcastRows& map, int64_t row) {
  const auto index = [row](RowMap run) { return run.count == 1 ? 0 : row / run.inner % run.count; };
  return index(map.outer) * map.inner.count + index(map.inner);
}

// The columns of one row. Those outside of [begin, begin + cols) do not count, and are left to the caller: all others
// are numbered from `begin` on.
struct RowMask {
  const uint8_t* where;  // null: all count
  int64_t begin, cols;

  static RowMask of(const Mask& mask, int64_t row, int64_t cols) {
    return mask ? find(mask, row, cols) : RowMask{nullptr, 0, cols};
  }

  // v, and `otherwise` in columns that do not count.
  template <class Extent>
  Vec operator()(Vec v, int64_t column, Extent extent, float otherwise) const {
    return where ? (lanes(where + column, extent) ? v : broadcast(otherwise)) : v;
  }

  // How many columns count.
  int64_t count() const {
    int64_t count = 0;
    for (int64_t column = 0; column < cols; ++column) count += !where || where[column];
    return count;
  }

  bool is_empty() const { return count() == 0; }

 private:
  // A function of its own: its divisions would stand in every loop over rows.
  [[gnu::noinline]] static RowMask find(const Mask& mask, int64_t row, int64_t cols) {
    const auto within = [](int64_t column, int64_t cols) { return column < 0 ? 0 : column < cols ? column : cols; };
    const int64_t end = mask.lengths ? within(mask.lengths[row_of(mask.lengths_rows, row)], cols) : cols;
    const int64_t begin = mask.starts ? within(mask.starts[row_of(mask.starts_rows, row)], end) : 0;
    const uint8_t* const where = mask.where ? mask.where + row_of(mask.where_rows, row) * cols + begin : nullptr;
    return {where, begin, end - begin};
  }
};

}  // namespace
}  // namespace jaxnorm::cpu
