// Rows in memory: how they are read and written.
#pragma once

#include "engine/cpu/vector.h"
#include "operands.h"

namespace jaxnorm::cpu {
namespace {

// R neighbouring rows, of which the last stands for those beyond `count` too.
template <int R, class T>
struct Rows {
  using Element = T;
  const T* data[R];

  // Rows begin `stride` elements apart.
  Rows(const T* array, int64_t stride, int64_t first, int64_t count) {
    for (int row = 0; row < R; ++row) data[row] = array + (first + (row < count ? row : count - 1)) * stride;
  }

  template <class Extent>
  Vec operator()(int row, int64_t column, Extent extent) const {
    return load(data[row] + column, extent);
  }
};

// A core reaches this much of last-level cache. What the system says of it is no use: in a virtual machine it may be
// the sum of many caches.
constexpr int64_t kCache = 32 << 20;

// How many elements ahead of the pass that writes its input is asked for, if that comes from memory: at least so far
// that it arrives in time, and at most so far that it still lies in the second-level cache when it is read.
int64_t elements_ahead(int64_t traffic, int64_t elements, int64_t size) {
  constexpr int64_t kLeast = 1 << 13, kMost = 1 << 18;
  if (traffic <= kCache) return 0;
  return (elements * size < kLeast ? kLeast : elements * size > kMost ? kMost : elements * size) / size;
}

// One row in the pass that writes. What the next rows' first pass will read is asked for meanwhile, where it has to
// come from memory: that pass does nothing but wait for it.
template <class T>
struct RowReader {
  const T* data;
  int64_t ahead;  // in elements; 0: nothing is asked for

  RowReader from(int64_t column) const { return {data + column, ahead}; }

  template <class Extent>
  Vec operator()(int64_t column, Extent extent) const {
    if (ahead) __builtin_prefetch(data + column + ahead);
    return load(data + column, extent);
  }
};

// One row of a result. Past the caches, a line of memory is not read before it is written.
template <class T>
struct RowWriter {
  T* data;  // null: the result is not wanted
  bool past_caches;

  explicit operator bool() const { return data != nullptr; }

  // Vectors that begin at another column are no longer aligned.
  RowWriter from(int64_t column) const { return {data + column, past_caches && column % W == 0}; }

  void operator()(int64_t column, Vec v, Whole whole) const {
    if (past_caches) {
      stream(data + column, v);
    } else {
      store(data + column, v, whole);
    }
  }
  void operator()(int64_t column, Vec v, Part part) const { store(data + column, v, part); }
};

// An operand whose rows begin `stride` elements apart.
template <class T>
struct InputRows {
  const T* data;
  int64_t stride, ahead;

  InputRows(Input input, int64_t stride, int64_t traffic = 0)
      : data(static_cast<const T*>(input.data)), stride(stride), ahead(elements_ahead(traffic, stride, sizeof(T))) {}

  const T* operator[](int64_t row) const { return data ? data + row * stride : nullptr; }
  RowReader<T> reader(int64_t row) const { return {data + row * stride, ahead}; }
};

// A result whose rows begin `stride` elements apart. They go past the caches if whoever reads them would not find much
// of them there, and all their whole vectors are aligned as stream() wants them.
template <class T>
struct OutputRows {
  using Element = T;

  T* data;
  int64_t stride;
  bool past_caches;

  OutputRows(Output output, int64_t stride, int64_t traffic)
      : data(static_cast<T*>(output.data)),
        stride(stride),
        past_caches(traffic > 2 * kCache && reinterpret_cast<uintptr_t>(data) % (W * sizeof(T)) == 0 &&
                    stride % W == 0) {}

  RowWriter<T> operator[](int64_t row) const { return {data ? data + row * stride : nullptr, past_caches}; }
};

}  // namespace
}  // namespace jaxnorm::cpu
