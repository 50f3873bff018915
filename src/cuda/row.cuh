// What a thread has of a row.
#pragma once

#include "cuda/granules.cuh"
#include "cuda/ring.cuh"
#include "cuda/vector.cuh"
#include "cuda/walk.cuh"

namespace jaxnorm::cuda {

// A row of T: in shared memory, once a ring has it; or held packed in registers, read once; or, as a streamed one is,
// read from memory in every pass.
template <typename T, typename W>
class Row {
 public:
  // `row`: the columns of this block in shared memory, if a ring has them, else all columns in global memory.
  template <typename Team>
  __device__ void read(const Team& team, const T* row) {
    row_ = row;
    if constexpr (W::RING) {
      row_ += first_of_thread<W>(team);
    } else if constexpr (W::SHIFTED) {
      read_granules<W>(team, row, packed_);
    } else if constexpr (W::KEPT) {
      for_each_vector<W>(
          team, [&](int slot, auto first, int left) { packed_[slot] = load<W::ALIGNED, W::N>(row_ + first, left); });
    }
  }

  // Columns past the row's end are zero.
  __device__ void get(int slot, int64_t first, int left, float (&to)[W::N]) const {
    if constexpr (W::RING) {
      unpack(left > 0 ? load_shared<W::N>(row_ + slot * W::STRIDE) : Packed<T, W::N>{}, to);
    } else if constexpr (!W::KEPT) {
      unpack(load<W::ALIGNED, W::N>(row_ + first, left), to);
    } else {
      unpack(packed_[slot], to);
    }
  }

 private:
  const T* row_ = nullptr;
  Packed<T, W::N> packed_[W::RING || !W::KEPT ? 1 : W::VECTORS];
};

// An element of a type that is seen at run time: of arrays that slow kernels read, one for all types.
struct AnyElement {};

template <typename W>
class Row<AnyElement, W> {
 public:
  template <typename Team>
  __device__ void read(const Team& team, const Input& row) {
    for_each_vector<W>(
        team, [&](int slot, auto first, int left) { load_floats<W::ALIGNED>(row, first, left, value_[slot]); });
  }

  __device__ void get(int slot, int64_t, int, float (&to)[W::N]) const {
#pragma unroll
    for (int i = 0; i < W::N; ++i) to[i] = value_[slot][i];
  }

 private:
  float value_[W::VECTORS][W::N];
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
template <typename A, typename T, typename W>
class SumRow {
 public:
  // From shared memory, once a ring has both.
  template <typename Team>
  __device__ void read(const Team& team, const A* a, const T* b) {
    a_ = a + first_of_thread<W>(team);
    b_ = b + first_of_thread<W>(team);
  }

  // From memory, and writes the sum if it is wanted. It may take b's place.
  template <typename Team>
  __device__ void read(const Team& team, const A* a, const T* b, T* sum, bool wanted) {
    constexpr int at_once = sizeof(T) == 4 ? 4 : W::VECTORS;  // on their way, as far as there are registers for them
    Packed<A, W::N> packed_a[W::VECTORS];
#pragma unroll
    for (int begin = 0; begin < W::VECTORS; begin += at_once) {
      for_each_vector<W>(team, [&](int slot, auto first, int left) {
        if (slot < begin || slot >= begin + at_once) return;
        packed_a[slot] = load_now<W::N>(a + first, left);
        packed_[slot] = load_now<W::N>(b + first, left);
      });
      if (at_once > 4) team.meet();  // or ptxas would put most of the loads off
      for_each_vector<W>(team, [&](int slot, auto first, int left) {
        if (slot < begin || slot >= begin + at_once) return;
        packed_[slot] = sum_of(packed_a[slot], packed_[slot]);
        if (wanted) store<W::ALIGNED>(sum + first, packed_[slot], left);
      });
    }
  }

  // b alone, from memory: nothing is added.
  template <typename Team>
  __device__ void read(const Team& team, const T* b) {
    for_each_vector<W>(
        team, [&](int slot, auto first, int left) { packed_[slot] = load<W::ALIGNED, W::N>(b + first, left); });
  }

  // Columns past the row's end are zero.
  __device__ void get(int slot, int64_t, int left, float (&to)[W::N]) const { unpack(packed(slot, left), to); }

  __device__ Packed<T, W::N> packed(int slot, int left) const {
    if constexpr (!W::RING) return packed_[slot];
    if (left <= 0) return {};
    return sum_of(load_shared<W::N>(a_ + slot * W::STRIDE), load_shared<W::N>(b_ + slot * W::STRIDE));
  }

 private:
  const A* a_ = nullptr;
  const T* b_ = nullptr;
  Packed<T, W::N> packed_[W::RING ? 1 : W::VECTORS];
};

// A thread's running sum over its part of a row, in two parts that do not wait for each other. Thousands of terms, as
// in a streamed row, need more than f32 to stay exact.
template <typename W>
class Sum {
 public:
  __device__ void add(const float (&a)[W::N]) {
#pragma unroll
    for (int i = 0; i < W::N; ++i) part_[i % 2] += a[i];
    turn();
  }

  __device__ void add_products(const float (&a)[W::N], const float (&b)[W::N]) {
#pragma unroll
    for (int i = 0; i < W::N; ++i) part_[i % 2] = fmaf(a[i], b[i], part_[i % 2]);
    turn();
  }

  __device__ auto value() const {
    if constexpr (W::STREAMED) {
      return total_;
    } else {
      return part_[0] + part_[1];
    }
  }

 private:
  __device__ void turn() {
    if constexpr (!W::STREAMED) return;
    total_ += part_[0] + part_[1];
    part_[0] = part_[1] = 0;
  }

  float part_[2] = {};
  double total_ = 0;
};

}  // namespace jaxnorm::cuda
