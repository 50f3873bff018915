// A row as a team sees it: cut into vectors of N elements, thread t of the team owning vectors t, t + size, ...
#pragma once

#include "cuda/team.cuh"
#include "cuda/vector.cuh"

namespace jaxnorm::cuda {

// Calls f(slot, first, valid) for each vector of this thread: `slot` counts them (a constant once unrolled, so that it
// may index registers), `first` is the vector's first column, `valid` how many of its N elements the row still has.
template <int N, int VECTORS, typename Team, typename F>
__device__ void for_each_vector(const Team& team, int64_t cols, F f) {
  if constexpr (VECTORS == kStreamed) {
    for (int64_t first = static_cast<int64_t>(team.rank) * N; first < cols; first += static_cast<int64_t>(team.size) * N)
      f(0, first, static_cast<int>(min(static_cast<int64_t>(N), cols - first)));
  } else {
    // Hides that the columns are the same for every row: the compiler would keep the addresses of all vectors of all
    // operands in registers, twice as many as the row itself takes.
    int rank = team.rank;
    asm volatile("" : "+r"(rank));
#pragma unroll
    for (int slot = 0; slot < VECTORS; ++slot) {
      const int first = (rank + slot * team.size) * N;
      if (first < cols) f(slot, first, min(N, static_cast<int>(cols) - first));
    }
  }
}

// One row of a T array: held packed in registers, read once; or streamed, read from memory in every pass.
template <typename T, int N, int VECTORS>
class Row {
 public:
  template <typename Team>
  __device__ Row(const Team& team, const void* data, int64_t row, int64_t cols, bool aligned)
      : data_(static_cast<const T*>(data) + row * cols), aligned_(aligned) {
    if constexpr (VECTORS != kStreamed) {
      // One branch around all loads, so that they are issued together.
      if (aligned) {
        read(team, cols, true);
      } else {
        read(team, cols, false);
      }
    }
  }

  __device__ void get(int slot, int64_t first, int valid, float (&to)[N]) const {
    if constexpr (VECTORS == kStreamed) {
      unpack(load<N>(data_ + first, valid, aligned_), to);
    } else {
      unpack(packed_[slot], to);
    }
  }

 private:
  template <typename Team>
  __device__ void read(const Team& team, int64_t cols, bool aligned) {
    for_each_vector<N, VECTORS>(team, cols, [&](int slot, int64_t first, int valid) {
      packed_[slot] = load<N>(data_ + first, valid, aligned);
    });
  }

  const T* data_;
  bool aligned_;
  Packed<T, N> packed_[VECTORS == kStreamed ? 1 : VECTORS];
};

// A thread's sum over its part of a row. Thousands of terms, as in a streamed row, need more than f32 to stay exact.
template <int VECTORS>
using Accumulator = std::conditional_t<VECTORS == kStreamed, double, float>;

// Calls f(row) for each row of this team.
template <typename Team, typename F>
__device__ void for_each_row(const Team& team, int64_t rows, F f) {
  for (int64_t row = team.first_row; row < rows; row += team.row_stride) f(row);
}

}  // namespace jaxnorm::cuda
