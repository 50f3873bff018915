// Rows of two arrays, both of which a thread has in registers between the sum of a row and its results.
#pragma once

#include "engine/cuda/fragment.cuh"

namespace jaxnorm::cuda {

// A thread's vectors of one of the arrays. `mask` says how many columns of a vector are read.
template <typename T, typename Tile>
class HeldRow {
 public:
  // `row`: as of Row<T>. A pipeline may fill its place again once the thread group has met.
  template <typename Group, typename Mask>
  __device__ void read(const Group& group, const T* row, const Mask& mask) {
    row_ = row;
    if constexpr (Tile::UNALIGNED) {
      read_words<Tile>(group, row, packed_);
    } else if constexpr (Tile::KEPT) {
      if constexpr (Tile::PIPELINED) row += first_of_thread<Tile>(group);
      for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
        if constexpr (Tile::PIPELINED) {
          packed_[vec] = remaining > 0 ? load_shared<Tile::N>(row + vec * Tile::STRIDE) : Packed<T, Tile::N>{};
        } else if constexpr (Tile::ALIGNED && Tile::N > 1) {
          packed_[vec] = load_now<Tile::N>(row + col, mask.within(col, remaining));
        } else {
          packed_[vec] = load<Tile::ALIGNED, Tile::N>(row + col, mask.within(col, remaining));
        }
      });
    }
  }

  // Columns past the row's end are zero.
  template <typename Mask>
  __device__ void get(int vec, int64_t col, int remaining, const Mask& mask, float (&to)[Tile::N]) const {
    if constexpr (Tile::KEPT) {
      unpack(packed_[vec], to);
    } else {
      unpack(load<Tile::ALIGNED, Tile::N>(row_ + col, mask.within(col, remaining)), to);
    }
  }

  // `zero`: as of unpack_again.
  __device__ void unpack_again(uint32_t zero) {
    if constexpr (Tile::KEPT && Tile::N > 1 && sizeof(T) < 4)
#pragma unroll
      for (auto& packed : packed_)
#pragma unroll
        for (uint32_t& word : packed.word) word ^= zero;
  }

 private:
  const T* row_ = nullptr;
  Packed<T, Tile::N> packed_[Tile::KEPT ? Tile::VECTORS : 1];
};

// Of an array whose type is seen at run time: as floats. All of a thread's vectors stand behind one branch.
template <typename Tile>
class HeldRow<AnyElement, Tile> {
 public:
  template <typename Group, typename Mask>
  __device__ void read(const Group& group, const Input& row, const Mask& mask) {
    row_ = row;
    if constexpr (Tile::KEPT)
      with_type(row.dtype, [&](auto* type) {
        const auto* const data = static_cast<const std::remove_pointer_t<decltype(type)>*>(row.data);
        for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
          unpack(load<Tile::ALIGNED, Tile::N>(data + col, mask.within(col, remaining)), value_[vec]);
        });
      });
  }

  template <typename Mask>
  __device__ void get(int vec, int64_t col, int remaining, const Mask& mask, float (&to)[Tile::N]) const {
    if constexpr (Tile::KEPT) {
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) to[i] = value_[vec][i];
    } else {
      load_floats<Tile::ALIGNED>(row_, col, mask.within(col, remaining), to);
    }
  }

  __device__ void unpack_again(uint32_t) {}

 private:
  Input row_;
  float value_[Tile::KEPT ? Tile::VECTORS : 1][Tile::N];
};

}  // namespace jaxnorm::cuda
