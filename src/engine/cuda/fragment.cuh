// A thread's fragment of a row.
#pragma once

#include "engine/cuda/pipeline.cuh"
#include "engine/cuda/tiling.cuh"
#include "engine/cuda/unaligned.cuh"
#include "engine/cuda/vector.cuh"

namespace jaxnorm::cuda {

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
