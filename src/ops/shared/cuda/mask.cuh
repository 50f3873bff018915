// A mask on the device: which columns of a row count, a vector of them at a time.
#pragma once

#include "engine/cuda/launch.cuh"
#include "engine/cuda/tiling.cuh"
#include "engine/cuda/vector.cuh"
#include "ops/shared/logits.h"

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

  // No column before the `count`-th counts.
  __device__ void clear_before(int count) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int off = count - 4 * i;
      if (off > 0) word[i] = off >= 4 ? 0 : word[i] & ~((1u << 8 * off) - 1);
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
  const int32_t* starts;
  BroadcastRowsLaunch starts_rows;

  explicit MaskLaunch(const Mask& mask)
      : where(mask.where),
        lengths(mask.lengths),
        where_rows(mask.where_rows),
        lengths_rows(mask.lengths_rows),
        starts(mask.starts),
        starts_rows(mask.starts ? mask.starts_rows : BroadcastRows{}) {}
};

// The masks of one row are of three types, for kernels of their own.

// Of a row all of whose columns count.
struct NoMask {
  static constexpr bool kMasks = false, kHasWindow = false;

  struct All {
    __device__ constexpr bool operator[](int) const { return true; }
  };
  __device__ static int within(int64_t, int remaining) { return remaining; }
  template <int N, typename Group>
  __device__ static const Group& columns(const Group& group) {
    return group;
  }
  template <bool ALIGNED, int N>
  __device__ static All counted(int64_t, int) {
    return {};
  }
};

struct RowMask {
  static constexpr bool kMasks = true, kHasWindow = false;

  const uint8_t* where = nullptr;  // null: all columns before `length` count
  int64_t length = 0;              // of 0 to the number of columns

  // window: as of Mask, for rows that have one.
  __device__ static RowMask of(const MaskLaunch& launch, int64_t row, int64_t cols, [[maybe_unused]] int window = 0) {
    RowMask mask{nullptr, cols};
    if (launch.lengths)
      mask.length = max(int64_t{0}, min(cols, int64_t{__ldg(launch.lengths + launch.lengths_rows.of_row(row))}));
    if (launch.where) mask.where = launch.where + launch.where_rows.of_row(row) * cols;
    return mask;
  }

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

  // What a thread group goes through: itself, that is all of a row.
  template <int N, typename Group>
  __device__ static const Group& columns(const Group& group) {
    return group;
  }

  // Whether any of the N columns from `col` on may not count.
  template <int N>
  __device__ bool may_hide(int64_t col, int remaining) const {
    return where || within(col, remaining) < N;
  }
};

// Of a row that has a block for itself: the columns before `begin` do not count either.
struct WindowMask : RowMask {
  static constexpr bool kHasWindow = true;

  int64_t begin = 0;  // at most `length`

  __device__ static WindowMask of(const MaskLaunch& launch, int64_t row, int64_t cols, int window) {
    WindowMask mask;
    const int length = max(0, __ldg(launch.lengths + launch.lengths_rows.of_row(row)));
    const int first = launch.starts ? __ldg(launch.starts + launch.starts_rows.of_row(row)) : length - window;
    mask.length = min(cols, int64_t{length});
    mask.begin = min(mask.length, int64_t{max(0, first)});
    if (launch.where) mask.where = launch.where + launch.where_rows.of_row(row) * cols;
    return mask;
  }

  template <bool ALIGNED, int N>
  __device__ Counted<N> counted(int64_t col, int remaining) const {
    Counted<N> counted = RowMask::counted<ALIGNED, N>(col, remaining);
    if (col < begin) counted.clear_before(static_cast<int>(min(begin - col, int64_t{N})));
    return counted;
  }

  template <int N>
  __device__ bool may_hide(int64_t col, int remaining) const {
    return col < begin || RowMask::may_hide<N>(col, remaining);
  }

  // Those through which a thread group goes, in whole vectors, as those of the group: nothing is read of others, which
  // are left to fill_outside.
  template <int N, typename Group>
  __device__ Rounds columns(const Group& group) const {
    if (begin == length) return {group.threads, group.rank, 0, 0};
    return {group.threads, group.rank, begin / N * N, min(group.end, (length + N - 1) / N * N)};
  }
};

// Gives a row's elements [begin, end) a value: in the 16-byte words that memory has of them, and one by one beside.
template <typename T>
__device__ void fill(const Rounds& columns, T* begin, T* end, float value) {
  constexpr int N = kVector<T>;
  float values[N];
#pragma unroll
  for (float& element : values) element = value;
  const Packed<T, N> packed = pack<T>(values);
  const int64_t off = reinterpret_cast<uintptr_t>(begin) / sizeof(T) % N;
  T* const words = begin + min(off == 0 ? int64_t{0} : N - off, int64_t{end - begin});
  T* const rest = words + (end - words) / N * N;
  for (T* to = words + columns.rank * N; to < rest; to += columns.threads * N) store<true>(to, packed, N);
  if (columns.rank < words - begin) begin[columns.rank] = static_cast<T>(value);
  if (columns.rank < end - rest) rest[columns.rank] = static_cast<T>(value);
}

// The columns of a row through which its thread group did not go.
template <typename T>
__device__ void fill_outside(const Rounds& columns, T* row, int64_t cols, float value) {
  fill(columns, row, row + columns.begin, value);
  fill(columns, row + columns.end, row + cols, value);
}

// Whether the bytes of vectors of N columns, which divide a row, may be read whole.
template <int N>
bool is_aligned_for(const Mask& mask) {
  return reinterpret_cast<uintptr_t>(mask.where) % N == 0;
}

}  // namespace jaxnorm::cuda
