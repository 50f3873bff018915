// A mask on the device: which columns of a row count, a vector of them at a time.
#pragma once

#include "cuda/engine/row_map.cuh"
#include "cuda/engine/vector.cuh"
#include "ops/shared/mask.h"

namespace jaxnorm::cuda {

// Which of N neighbouring columns count: of those the highest bit of a byte is set, and the other bits are anything.
template <int N>
struct Counted {
  static constexpr int kWords = (N + 3) / 4;
  uint32_t word[kWords];

  __device__ bool operator[](int i) const { return (word[i / 4] & 0x80u << i % 4 * 8) != 0; }

  __device__ bool any() const {
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) all |= word[i];
    return (all & 0x80808080u) != 0;
  }

  // No column from the `remaining`-th on counts.
  __device__ void clear_from(int remaining) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int left = remaining - 4 * i;
      if (left < 4) word[i] = left <= 0 ? 0 : word[i] & ((1u << 8 * left) - 1);
    }
  }

  // `values`, with one element's bits `otherwise` in the place of those that do not count; of a half type `otherwise`
  // has them twice.
  template <typename T>
  __device__ Packed<T, N> choose(Packed<T, N> values, uint32_t otherwise) const {
    if constexpr (N == 1) {
      T* const element = &values.element;
      if (!(*this)[0]) *element = reinterpret_cast<const T&>(otherwise);
    } else {
      constexpr int kOfWord = 4 / sizeof(T);  // elements
#pragma unroll
      for (int i = 0; i < N / kOfWord; ++i) {
        const int byte = i * kOfWord % 4;
        // Bytes of the word, each of whose highest bits fills one byte of the bits that stay.
        const uint32_t stay = kOfWord == 2 ? spread_highest(word[i / 2], byte, byte, byte + 1, byte + 1)
                                           : spread_highest(word[i / 4], byte, byte, byte, byte);
        values.word[i] = (values.word[i] & stay) | (otherwise & ~stay);
      }
    }
    return values;
  }
};

// The bytes of N columns.
template <bool ALIGNED, int N>
__device__ Counted<N> load_bytes(const uint8_t* from, int remaining) {
  Counted<N> bytes{};
  if constexpr (ALIGNED && N == 8) {
    if (remaining > 0) {
      const uint2 words = __ldg(reinterpret_cast<const uint2*>(from));
      bytes.word[0] = words.x, bytes.word[1] = words.y;
    }
  } else if constexpr (ALIGNED && N == 4) {
    if (remaining > 0) bytes.word[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < remaining) bytes.word[i / 4] |= static_cast<uint32_t>(__ldg(from + i)) << i % 4 * 8;
  }
  return bytes;
}

// The mask of one row.
struct RowMask {
  const uint8_t* where = nullptr;  // null: all columns before `length` count
  int64_t length = 0;              // of 0 to the number of columns

  // How many of the `remaining` columns from `col` on come before `length`: of the others nothing has to be read.
  // Negative: none.
  __device__ int within(int64_t col, int remaining) const {
    return static_cast<int>(min(static_cast<int64_t>(remaining), max(length - col, static_cast<int64_t>(-1))));
  }

  // Of the N columns from `col` on, of which the row has `remaining`. ALIGNED: as in `load`, of the mask's bytes too.
  template <bool ALIGNED, int N>
  __device__ Counted<N> counted(int64_t col, int remaining) const {
    remaining = within(col, remaining);
    Counted<N> counted;
#pragma unroll
    for (int i = 0; i < Counted<N>::kWords; ++i) counted.word[i] = 0x80808080u;
    if (where) {
      counted = load_bytes<ALIGNED, N>(where + col, remaining);
#pragma unroll
      for (uint32_t& word : counted.word) word |= (word & 0x7f7f7f7fu) + 0x7f7f7f7fu;
    }
    if (remaining < N) counted.clear_from(remaining);
    return counted;
  }
};

// BroadcastRows without divisions.
struct BroadcastRowsLaunch {
  RowMapLaunch outer, inner;

  explicit BroadcastRowsLaunch(const BroadcastRows& rows) : outer(rows.outer), inner(rows.inner) {}

  __device__ int64_t of_row(int64_t row) const { return outer.of_row(row) * inner.count.value + inner.of_row(row); }
};

// What a kernel knows of a mask.
struct MaskLaunch {
  const uint8_t* where;
  const int32_t* lengths;
  BroadcastRowsLaunch where_rows, lengths_rows;

  explicit MaskLaunch(const Mask& mask)
      : where(mask.where), lengths(mask.lengths), where_rows(mask.where_rows), lengths_rows(mask.lengths_rows) {}

  __device__ RowMask of_row(int64_t row, int64_t cols) const {
    RowMask mask{nullptr, cols};
    if (lengths) mask.length = max(int64_t{0}, min(cols, int64_t{__ldg(lengths + lengths_rows.of_row(row))}));
    if (where) mask.where = where + where_rows.of_row(row) * cols;
    return mask;
  }
};

// Whether the bytes of vectors of N columns, which divide a row, may be read whole.
template <int N>
bool is_aligned_for(const Mask& mask) {
  return reinterpret_cast<uintptr_t>(mask.where) % N == 0;
}

}  // namespace jaxnorm::cuda
