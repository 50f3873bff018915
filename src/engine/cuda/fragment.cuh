// A thread's fragment of a row, whose vectors may be unaligned.
#pragma once

#include "engine/cuda/pipeline.cuh"
#include "engine/cuda/tiling.cuh"
#include "engine/cuda/vector.cuh"

namespace jaxnorm::cuda {

// Unaligned vectors, for rows of half types that vectors do not divide. Such a row begins and ends anywhere in a
// 16-byte word, which is one access. A vector is put together from the two words in which it lies, and a word to be
// written from two neighbouring vectors. Memory is not allocated in smaller pieces than such words, so they may be read
// whole.

// How many elements of the word in which a row begins come before it.
template <typename T>
__device__ int offset_in_word(const T* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kVector<T>);
}

// N elements that begin with a word. Of these words it reads those that have any of the `remaining` elements.
template <int N, typename T>
__device__ Packed<T, N> load_words(const T* from, int remaining) {
  Packed<T, N> packed{};
#pragma unroll
  for (int i = 0; i < N / kVector<T>; ++i)
    if (remaining > i * kVector<T>)
      reinterpret_cast<uint4*>(packed.word)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
  return packed;
}

// The elements of a and b side by side, from the `begin`-th on; begin < N.
template <typename T, int N>
__device__ Packed<T, N> elements_from(int begin, const Packed<T, N>& a, const Packed<T, N>& b) {
  static_assert(N == kVector<T>);
  constexpr int kOfWord = 4 / sizeof(T);
  uint32_t word[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = a.word[i], word[i + 4] = b.word[i];
  // By whole words, and by half a one.
#pragma unroll
  for (int distance = 2; distance > 0; distance /= 2)
#pragma unroll
    for (int i = 0; i < 4 + distance; ++i)
      if (begin / kOfWord & distance) word[i] = word[i + distance];
  Packed<T, N> result;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    result.word[i] =
        kOfWord == 1 ? word[i]
                     : static_cast<uint32_t>((static_cast<uint64_t>(word[i + 1]) << 32 | word[i]) >> begin % 2 * 16);
  return result;
}

// A vector that lies anywhere, of which `remaining` elements are there; those from there on are anything.
template <int N, typename T>
__device__ Packed<T, N> load_unaligned(const T* from, int remaining) {
  const int offset = offset_in_word(from);
  const Packed<T, N> first = load<true, N>(from - offset, remaining);
  const Packed<T, N> second = load<true, N>(from - offset + N, min(remaining, N) + offset - N);
  return elements_from(offset, first, second);
}

// Sets the elements from the `remaining`-th on to zero.
template <typename T, int N>
__device__ void clear_from(int remaining, Packed<T, N>& packed) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i)
    if (remaining < 2 * i + 2) packed.word[i] &= remaining <= 2 * i ? 0 : 0xffffu;
}

// A thread's vectors of a row, with zeros past its end.
template <typename Tile, typename ThreadGroup, typename T>
__device__ void read_words(const ThreadGroup& group, const T* row, Packed<T, Tile::N> (&to)[Tile::VECTORS]) {
  const int offset = offset_in_word(row);
  const T* const words = row - offset;
  Packed<T, Tile::N> next[Tile::VECTORS];
  for_each_vector<Tile>(group, [&](int vec, int col, int remaining) {
    to[vec] = load<true, Tile::N>(words + col, remaining);
    next[vec] = load<true, Tile::N>(words + col + Tile::N, remaining + offset - Tile::N);
  });
  for_each_vector<Tile>(group, [&](int vec, int, int remaining) {
    to[vec] = elements_from(offset, to[vec], next[vec]);
    if (remaining < Tile::N) clear_from(remaining, to[vec]);
  });
}

// Writes a row. Each thread gives its vectors one after the other, and all threads of a thread group take part in each.
template <typename T, typename Tile>
class UnalignedWriter {
 public:
  UnalignedWriter() = default;
  template <typename ThreadGroup>
  __device__ UnalignedWriter(const ThreadGroup& group, T* row)
      : place_(group.rank % Tile::LANES), offset_(offset_in_word(row)), words_(row - offset_) {}

  // Writes nothing unless it is `wanted`.
  __device__ void write(int vec, int col, int remaining, const Packed<T, Tile::N>& vector, bool wanted) {
    constexpr int N = Tile::N, last = Tile::LANES - 1;
    // The first lane's neighbour is the last lane's vector before this one.
    const int neighbour = offset_ > 0 ? (place_ + last) % Tile::LANES : place_;
    Packed<T, N> before;
#pragma unroll
    for (int i = 0; i < N / 2; ++i)
      before.word[i] =
          __shfl_sync(lanes_mask<Tile::LANES>(), offset_ > 0 && place_ == last ? before_.word[i] : vector.word[i],
                      neighbour, Tile::LANES);
    before_ = vector;
    if (!wanted) return;
    const int begin = (N - offset_) % N, end = remaining + offset_;
    const Packed<T, N> word16 = elements_from(begin, before, vector);
    if (vec == 0 && place_ == 0 && offset_ > 0) {
      edge_ = word16;
      edge_end_ = end;
    } else if (end >= N) {
      store<true>(words_ + col, word16, N);
    } else if (end > 0) {
      store_elements<N>(words_ + col, word16, end);
    }
    if (vec < Tile::VECTORS - 1 || offset_ == 0) return;
    if (place_ == last) {
      edge_ = elements_from(begin, vector, vector);
      edge_end_ = min(offset_, end - N);
    }
    if (place_ == 0 || place_ == last)
      write_edge(words_ + (place_ == 0 ? col - vec * Tile::STRIDE : col + N), place_ == 0 ? offset_ : 0);
  }

 private:
  __device__ void write_edge(T* to, int begin) const {
#pragma unroll
    for (int i = 0; i < Tile::N; ++i)
      if (i >= begin && i < edge_end_)
        reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(edge_.word[i / 2] >> i % 2 * 16);
  }

  int place_, offset_;  // of the thread among the lanes of its row, and of the row in its first word
  T* words_;
  Packed<T, Tile::N> before_;
  // This thread's elements of the word between this warp's columns and those of the warp before it or after it.
  Packed<T, Tile::N> edge_;
  int edge_end_;
};

// Of a row of T: in shared memory, once a pipeline has it; or packed in registers, read once; or, if it is streamed,
// read from memory in every pass.
template <typename T, typename Tile>
class Row {
 public:
  // `row`: this block's columns in shared memory, if a pipeline has them, else all columns in global memory.
  template <typename ThreadGroup>
  __device__ void read(const ThreadGroup& group, const T* row) {
    row_ = row;
    if constexpr (Tile::PIPELINED) {
      row_ += first_of_thread<Tile>(group);
    } else if constexpr (Tile::UNALIGNED) {
      read_words<Tile>(group, row, packed_);
    } else if constexpr (Tile::KEPT) {
      for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
        packed_[vec] = load<Tile::ALIGNED, Tile::N>(row_ + col, remaining);
      });
    }
  }

  // The row in memory, where no pipeline has it.
  __device__ const T* data() const { return row_; }

  // Columns past the row's end are zero.
  __device__ void get(int vec, int64_t col, int remaining, float (&to)[Tile::N]) const {
    if constexpr (Tile::PIPELINED) {
      unpack(remaining > 0 ? load_shared<Tile::N>(row_ + vec * Tile::STRIDE) : Packed<T, Tile::N>{}, to);
    } else if constexpr (!Tile::KEPT) {
      unpack(load<Tile::ALIGNED, Tile::N>(row_ + col, remaining), to);
    } else {
      unpack(packed_[vec], to);
    }
  }

 private:
  const T* row_ = nullptr;
  Packed<T, Tile::N> packed_[Tile::PIPELINED || !Tile::KEPT ? 1 : Tile::VECTORS];
};

// An element whose type is seen at run time, of arrays that slow kernels read: one kernel for all types.
struct AnyElement {};

template <typename Tile>
class Row<AnyElement, Tile> {
 public:
  template <typename ThreadGroup>
  __device__ void read(const ThreadGroup& group, const Input& row) {
    for_each_vector<Tile>(
        group, [&](int vec, auto col, int remaining) { load_floats<Tile::ALIGNED>(row, col, remaining, value_[vec]); });
  }

  __device__ void get(int vec, int64_t, int, float (&to)[Tile::N]) const {
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) to[i] = value_[vec][i];
  }

 private:
  float value_[Tile::VECTORS][Tile::N];
};

// The row of an array that begins at element `at`, as Row<T> reads it.
template <typename T>
__device__ auto row_at(const Input& array, int64_t at) {
  if constexpr (std::is_same_v<T, AnyElement>) {
    return from(array, at);
  } else {
    return static_cast<const T*>(array.data) + at;
  }
}

// a + b, rounded to b's type.
template <typename A, typename T, int N>
__device__ Packed<T, N> sum_of(const Packed<A, N>& a, const Packed<T, N>& b) {
  float values[N], more[N];
  unpack(a, values);
  unpack(b, more);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] += more[i];
  return pack<T>(values);
}

// factor * a + b, the product rounded to f32, the sum to b's type.
template <typename A, typename T, int N>
__device__ Packed<T, N> scaled_sum_of(const float (&factor)[N], const Packed<A, N>& a, const Packed<T, N>& b) {
  float values[N], more[N];
  unpack(a, values);
  unpack(b, more);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = values[i] * factor[i] + more[i];  // compiled without contraction
  return pack<T>(values);
}

// Of the sum of a row of A and a row of T, rounded to T: as Row<T>.
template <typename A, typename T, typename Tile>
class SumRow {
 public:
  // From shared memory, once a pipeline has both.
  template <typename ThreadGroup>
  __device__ void read(const ThreadGroup& group, const A* a, const T* b) {
    a_ = a + first_of_thread<Tile>(group);
    b_ = b + first_of_thread<Tile>(group);
  }

  // From memory. Writes the sum if it is wanted; it may take b's place.
  template <typename ThreadGroup>
  __device__ void read(const ThreadGroup& group, const A* a, const T* b, T* sum, bool wanted) {
    read(group, a, b, sum, wanted, [](int, auto, int, const auto& x, const auto& y) { return sum_of(x, y); });
  }

  // The same with another sum of two vectors.
  template <typename ThreadGroup, typename F>
  __device__ void read(const ThreadGroup& group, const A* a, const T* b, T* sum, bool wanted, F sum_of_vectors) {
    constexpr int at_once = sizeof(T) == 4 ? 4 : Tile::VECTORS;  // as many on their way as there are registers for
    Packed<A, Tile::N> packed_a[Tile::VECTORS];
#pragma unroll
    for (int begin = 0; begin < Tile::VECTORS; begin += at_once) {
      for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
        if (vec < begin || vec >= begin + at_once) return;
        packed_a[vec] = load_now<Tile::N>(a + col, remaining);
        packed_[vec] = load_now<Tile::N>(b + col, remaining);
      });
      if (at_once > 4) group.meet();  // or ptxas would put most of the loads off
      for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
        if (vec < begin || vec >= begin + at_once) return;
        packed_[vec] = sum_of_vectors(vec, col, remaining, packed_a[vec], packed_[vec]);
        if (wanted) store<Tile::ALIGNED>(sum + col, packed_[vec], remaining);
      });
    }
  }

  // b alone, from memory: nothing is added.
  template <typename ThreadGroup>
  __device__ void read(const ThreadGroup& group, const T* b) {
    for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
      packed_[vec] = load<Tile::ALIGNED, Tile::N>(b + col, remaining);
    });
  }

  // Columns past the row's end are zero.
  __device__ void get(int vec, int64_t, int remaining, float (&to)[Tile::N]) const {
    unpack(packed(vec, remaining), to);
  }

  __device__ Packed<T, Tile::N> packed(int vec, int remaining) const {
    if constexpr (!Tile::PIPELINED) return packed_[vec];
    if (remaining <= 0) return {};
    return sum_of(load_shared<Tile::N>(a_ + vec * Tile::STRIDE), load_shared<Tile::N>(b_ + vec * Tile::STRIDE));
  }

 private:
  const A* a_ = nullptr;
  const T* b_ = nullptr;
  Packed<T, Tile::N> packed_[Tile::PIPELINED ? 1 : Tile::VECTORS];
};

// A thread's running sum over its columns of a row, in two halves that do not wait for each other. Thousands of terms,
// as in a streamed row, need more than f32 to stay exact.
template <typename Tile>
class Sum {
 public:
  __device__ void add(const float (&a)[Tile::N]) {
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) half_[i % 2] += a[i];
    end_vector();
  }

  __device__ void add_products(const float (&a)[Tile::N], const float (&b)[Tile::N]) {
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) half_[i % 2] = fmaf(a[i], b[i], half_[i % 2]);
    end_vector();
  }

  __device__ auto value() const {
    if constexpr (Tile::STREAMED) {
      return total_;
    } else {
      return half_[0] + half_[1];
    }
  }

 private:
  __device__ void end_vector() {
    if constexpr (!Tile::STREAMED) return;
    total_ += half_[0] + half_[1];
    half_[0] = half_[1] = 0;
  }

  float half_[2] = {};
  double total_ = 0;
};

}  // namespace jaxnorm::cuda
