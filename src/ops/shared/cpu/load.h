// A load functor: rows as they lie in memory, which an addition may have to write first.
#pragma once

#include "engine/cpu/columns.h"
#include "engine/cpu/vector.h"
#include "ops/norm/call.h"

namespace jaxnorm::cpu {
namespace {

// Each vector of b is read before that of the sum is written, which may lie there. A factor is f32.
void add_rows(const Addition& p, int64_t cols, int64_t first, int64_t count) {
  with_types(p.a.dtype, p.b.dtype, [&](auto a_type, auto sum_type) {
    using Sum = decltype(sum_type);
    const auto* const a = static_cast<const decltype(a_type)*>(p.a.data) + first * cols;
    const auto* const b = static_cast<const Sum*>(p.b.data) + first * cols;
    auto* const sum = static_cast<Sum*>(p.sum.data) + first * cols;
    const auto* const factor = static_cast<const float*>(p.factor.data);
    if (!factor) {
      for_each_vector(count * cols, [&](int64_t i, auto extent) {
        store(sum + i, load(a + i, extent) + load(b + i, extent), extent);
      });
      return;
    }
    for (int64_t row = 0; row < count; ++row) {
      const float* const of_row = factor + weights_of(p.factor_rows, first + row, cols);
      for_each_vector(cols, [&](int64_t column, auto extent) {
        const int64_t i = row * cols + column;
        store(sum + i, load(of_row + column, extent) * load(a + i, extent) + load(b + i, extent), extent);
      });
    }
  });
}

template <class T>
struct Stored {
  Input x;
  int64_t cols;
  const Addition* addition = nullptr;

  int64_t ahead(int64_t traffic, int64_t elements) const { return elements_ahead(traffic, elements, sizeof(T)); }

  template <int R>
  Rows<R, T> rows(int64_t first, int64_t count) const {
    if (addition) add_rows(*addition, cols, first, count);
    return Rows<R, T>(static_cast<const T*>(x.data), cols, first, count);
  }
};

}  // namespace
}  // namespace jaxnorm::cpu
