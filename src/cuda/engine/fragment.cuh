// What a thread has of a row.
#pragma once

#include "cuda/engine/pipeline.cuh"
#include "cuda/engine/tiling.cuh"
#include "cuda/engine/unaligned.cuh"
#include "cuda/engine/vector.cuh"

namespace jaxnorm::cuda {

// A row of T: in shared memory, once a pipeline has it; or held packed in registers, read once; or, as a streamed one
// is, read from memory in every pass.
template <typename T, typename Tile>
class Row {
 public:
  // `row`: the columns of this block in shared memory, if a pipeline has them, else all columns in global memory.
  template <typename ThreadGroup>
  __device__ void read(const ThreadGroup& group, const T* row) {
    row_ = row;
    if constexpr (Tile::PIPELINED) {
      row_ += first_of_thread<Tile>(group);
    } else if constexpr (Tile::UNALIGNED) {
      read_words<Tile>(group, row, packed_);
    } else if constexpr (Tile::KEPT) {
      for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
        packed_[slot] = load<Tile::ALIGNED, Tile::N>(row_ + first, left);
      });
    }
  }

  // Columns past the row's end are zero.
  __device__ void get(int slot, int64_t first, int left, float (&to)[Tile::N]) const {
    if constexpr (Tile::PIPELINED) {
      unpack(left > 0 ? load_shared<Tile::N>(row_ + slot * Tile::STRIDE) : Packed<T, Tile::N>{}, to);
    } else if constexpr (!Tile::KEPT) {
      unpack(load<Tile::ALIGNED, Tile::N>(row_ + first, left), to);
    } else {
      unpack(packed_[slot], to);
    }
  }

 private:
  const T* row_ = nullptr;
  Packed<T, Tile::N> packed_[Tile::PIPELINED || !Tile::KEPT ? 1 : Tile::VECTORS];
};

// An element of a type that is seen at run time: of arrays that slow kernels read, one for all types.
struct AnyElement {};

template <typename Tile>
class Row<AnyElement, Tile> {
 public:
  template <typename ThreadGroup>
  __device__ void read(const ThreadGroup& group, const Input& row) {
    for_each_vector<Tile>(
        group, [&](int slot, auto first, int left) { load_floats<Tile::ALIGNED>(row, first, left, value_[slot]); });
  }

  __device__ void get(int slot, int64_t, int, float (&to)[Tile::N]) const {
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) to[i] = value_[slot][i];
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

// The sum of a row of A and one of T, rounded to T, as a Row of T.
template <typename A, typename T, typename Tile>
class SumRow {
 public:
  // From shared memory, once a pipeline has both.
  template <typename ThreadGroup>
  __device__ void read(const ThreadGroup& group, const A* a, const T* b) {
    a_ = a + first_of_thread<Tile>(group);
    b_ = b + first_of_thread<Tile>(group);
  }

  // From memory, and writes the sum if it is wanted. It may take b's place.
  template <typename ThreadGroup>
  __device__ void read(const ThreadGroup& group, const A* a, const T* b, T* sum, bool wanted) {
    constexpr int at_once = sizeof(T) == 4 ? 4 : Tile::VECTORS;  // on their way, as far as there are registers for them
    Packed<A, Tile::N> packed_a[Tile::VECTORS];
#pragma unroll
    for (int begin = 0; begin < Tile::VECTORS; begin += at_once) {
      for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
        if (slot < begin || slot >= begin + at_once) return;
        packed_a[slot] = load_now<Tile::N>(a + first, left);
        packed_[slot] = load_now<Tile::N>(b + first, left);
      });
      if (at_once > 4) group.meet();  // or ptxas would put most of the loads off
      for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
        if (slot < begin || slot >= begin + at_once) return;
        packed_[slot] = sum_of(packed_a[slot], packed_[slot]);
        if (wanted) store<Tile::ALIGNED>(sum + first, packed_[slot], left);
      });
    }
  }

  // b alone, from memory: nothing is added.
  template <typename ThreadGroup>
  __device__ void read(const ThreadGroup& group, const T* b) {
    for_each_vector<Tile>(
        group, [&](int slot, auto first, int left) { packed_[slot] = load<Tile::ALIGNED, Tile::N>(b + first, left); });
  }

  // Columns past the row's end are zero.
  __device__ void get(int slot, int64_t, int left, float (&to)[Tile::N]) const { unpack(packed(slot, left), to); }

  __device__ Packed<T, Tile::N> packed(int slot, int left) const {
    if constexpr (!Tile::PIPELINED) return packed_[slot];
    if (left <= 0) return {};
    return sum_of(load_shared<Tile::N>(a_ + slot * Tile::STRIDE), load_shared<Tile::N>(b_ + slot * Tile::STRIDE));
  }

 private:
  const A* a_ = nullptr;
  const T* b_ = nullptr;
  Packed<T, Tile::N> packed_[Tile::PIPELINED ? 1 : Tile::VECTORS];
};

// A thread's running sum over its part of a row, in two parts that do not wait for each other. Thousands of terms, as
// in a streamed row, need more than f32 to stay exact.
template <typename Tile>
class Sum {
 public:
  __device__ void add(const float (&a)[Tile::N]) {
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) part_[i % 2] += a[i];
    turn();
  }

  __device__ void add_products(const float (&a)[Tile::N], const float (&b)[Tile::N]) {
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) part_[i % 2] = fmaf(a[i], b[i], part_[i % 2]);
    turn();
  }

  __device__ auto value() const {
    if constexpr (Tile::STREAMED) {
      return total_;
    } else {
      return part_[0] + part_[1];
    }
  }

 private:
  __device__ void turn() {
    if constexpr (!Tile::STREAMED) return;
    total_ += part_[0] + part_[1];
    part_[0] = part_[1] = 0;
  }

  float part_[2] = {};
  double total_ = 0;
};

}  // namespace jaxnorm::cuda
