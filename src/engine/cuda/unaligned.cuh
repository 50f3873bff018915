// Unaligned vectors, for rows of half types that vectors do not divide. Such a row begins and ends anywhere in a
// 16-byte word, which is one access. A vector is put together from the two words in which it lies, and a word to be
// written from two neighbouring vectors. Memory is not allocated in smaller pieces than such words, so they may be read
// whole.
#pragma once

#include "engine/cuda/tiling.cuh"
#include "engine/cuda/vector.cuh"

namespace jaxnorm::cuda {

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

}  // namespace jaxnorm::cuda
