// A row as a team sees it: cut into vectors of N elements, thread t of the team owning vectors t, t + threads, ...
#pragma once

#include "cuda/launch.cuh"
#include "cuda/ring.cuh"
#include "cuda/team.cuh"
#include "cuda/vector.cuh"

namespace jaxnorm::cuda {

// How a kernel walks rows of X, of which a thread owns VECTORS_ vectors. As the compiler knows ACCESS, every vector is
// whole where they are not read by elements, and the checks are gone.
template <typename X, int VECTORS_, Access ACCESS>
struct Walk {
  static constexpr int N = kVector<X>, VECTORS = VECTORS_;
  static constexpr bool ALIGNED = ACCESS != Access::elements, STREAMED = VECTORS == kStreamed;
  static constexpr bool RING = ACCESS == Access::ring;
};

// Calls f(slot, first, valid) for each vector of this thread: `slot` counts them (a constant once unrolled, so that it
// may index registers), `first` is the vector's first column, `valid` how many of its N elements the row still has.
template <typename W, typename Team, typename F>
__device__ void for_each_vector(const Team& team, F f) {
  constexpr int N = W::N;
  if constexpr (W::STREAMED) {
    for (int64_t first = team.begin + static_cast<int64_t>(team.rank) * N; first < team.end;
         first += static_cast<int64_t>(team.threads) * N)
      f(0, first, W::ALIGNED ? N : static_cast<int>(min(static_cast<int64_t>(N), team.end - first)));
  } else {
    // Hides that the columns are the same for every row: the compiler would keep the addresses of all vectors of all
    // operands in registers, twice as many as the row itself takes.
    int rank = team.rank;
    asm volatile("" : "+r"(rank));
    const int begin = static_cast<int>(team.begin), end = static_cast<int>(team.end);
#pragma unroll
    for (int slot = 0; slot < W::VECTORS; ++slot) {
      const int first = begin + (rank + slot * team.threads) * N;
      if (first < end) f(slot, first, W::ALIGNED ? N : min(N, end - first));
    }
  }
}

// A row of T: in shared memory, once a ring has it; or held packed in registers, read once; or streamed, read from
// memory in every pass.
template <typename T, typename W>
class Row {
 public:
  // `row`: the columns of this block in shared memory, if a ring has them, else all columns in global memory.
  template <typename Team>
  __device__ void read(const Team& team, const T* row) {
    row_ = row;
    if constexpr (W::RING) {
      row_ += team.rank * W::N;
      step_ = team.threads * W::N;
    } else if constexpr (!W::STREAMED) {
      for_each_vector<W>(team, [&](int slot, int64_t first, int valid) {
        packed_[slot] = load<W::N>(row_ + first, valid, W::ALIGNED);
      });
    }
  }

  __device__ void get(int slot, int64_t first, int valid, float (&to)[W::N]) const {
    if constexpr (W::RING) {
      unpack(load_shared<W::N>(row_ + slot * step_), to);
    } else if constexpr (W::STREAMED) {
      unpack(load<W::N>(row_ + first, valid, W::ALIGNED), to);
    } else {
      unpack(packed_[slot], to);
    }
  }

 private:
  const T* row_ = nullptr;
  int step_ = 0;
  Packed<T, W::N> packed_[W::STREAMED || W::RING ? 1 : W::VECTORS];
};

// scale or bias: the same for every row. `offset` is added to every element; `absent` is what a weight that is not
// there has for elements.
//
// This one is loaded for each row. It is there and of type T; or it may be absent and of any type if T is void.
template <typename T, typename W>
class LoadedWeight {
 public:
  __device__ LoadedWeight(const Input& weight, float offset, float absent)
      : weight_(weight), offset_(offset), absent_(absent) {}
  template <typename Team>
  __device__ LoadedWeight(const Team&, const Input& weight, float offset, float absent)
      : LoadedWeight(weight, offset, absent) {}

  __device__ void get(int, int64_t first, int valid, float (&to)[W::N]) const {
    if constexpr (!std::is_void_v<T>) {
      unpack(load<W::N>(static_cast<const T*>(weight_.data) + first, valid, W::ALIGNED), to);
    } else if (weight_.data) {
      load_floats(weight_, first, valid, W::ALIGNED, to);
    }
#pragma unroll
    for (int i = 0; i < W::N; ++i) to[i] = !std::is_void_v<T> || weight_.data ? to[i] + offset_ : absent_;
  }

 private:
  const Input weight_;
  const float offset_, absent_;
};

// And this one is held in registers for all rows of a team.
template <typename W>
class HeldWeight {
 public:
  template <typename Team>
  __device__ HeldWeight(const Team& team, const Input& weight, float offset, float absent) {
    if (weight.data)
      with_type(weight.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_each_vector<W>(team, [&](int slot, int64_t first, int valid) {
          unpack(load<W::N>(static_cast<const T*>(weight.data) + first, valid, W::ALIGNED), value_[slot]);
        });
      });
#pragma unroll
    for (int slot = 0; slot < W::VECTORS; ++slot)
#pragma unroll
      for (int i = 0; i < W::N; ++i) value_[slot][i] = weight.data ? value_[slot][i] + offset : absent;
  }

  __device__ void get(int slot, int64_t, int, float (&to)[W::N]) const {
#pragma unroll
    for (int i = 0; i < W::N; ++i) to[i] = value_[slot][i];
  }

 private:
  float value_[W::VECTORS][W::N];
};

template <typename T, typename W>
using Weight = std::conditional_t<W::RING, HeldWeight<W>, LoadedWeight<T, W>>;

// A thread's sum over its part of a row. Thousands of terms, as in a streamed row, need more than f32 to stay exact.
template <typename W>
using Accumulator = std::conditional_t<W::STREAMED, double, float>;

}  // namespace jaxnorm::cuda
