// A row as a team sees it: cut into vectors of N elements, thread t of the team owning vectors t, t + size, ...
//
// Where a block goes on to further rows, it may have a stage, its threads' shares of its shared memory: the next row is
// copied there while this one is worked on, and scale and bias stay there for all rows. A thread reads back only what
// it copied itself, so that no barrier is needed.
#pragma once

#include <cuda_pipeline.h>

#include "cuda/launch.cuh"
#include "cuda/team.cuh"
#include "cuda/vector.cuh"

namespace jaxnorm::cuda {

// How a kernel walks rows of X, of which a thread owns VECTORS_ vectors. As the compiler knows ACCESS, every vector is
// whole where they are not read by elements, and the checks are gone.
template <typename X, int VECTORS_, Access ACCESS>
struct Walk {
  static constexpr int N = kVector<X>, VECTORS = VECTORS_;
  static constexpr bool ALIGNED = ACCESS != Access::elements, STREAMED = VECTORS == kStreamed;
  static constexpr bool STAGED = ACCESS == Access::staged;
};

// Calls f(slot, first, valid) for each vector of this thread: `slot` counts them (a constant once unrolled, so that it
// may index registers), `first` is the vector's first column, `valid` how many of its N elements the row still has.
template <typename W, typename Team, typename F>
__device__ void for_each_vector(const Team& team, int64_t cols, F f) {
  constexpr int N = W::N;
  if constexpr (W::STREAMED) {
    for (int64_t first = static_cast<int64_t>(team.rank) * N; first < cols;
         first += static_cast<int64_t>(team.size) * N)
      f(0, first, W::ALIGNED ? N : static_cast<int>(min(static_cast<int64_t>(N), cols - first)));
  } else {
    // Hides that the columns are the same for every row: the compiler would keep the addresses of all vectors of all
    // operands in registers, twice as many as the row itself takes.
    int rank = team.rank;
    asm volatile("" : "+r"(rank));
#pragma unroll
    for (int slot = 0; slot < W::VECTORS; ++slot) {
      const int first = (rank + slot * team.size) * N;
      if (first < cols) f(slot, first, W::ALIGNED ? N : min(N, static_cast<int>(cols) - first));
    }
  }
}

// The bytes that a block stages of an array of which a vector takes `vector_bytes`.
__host__ __device__ inline int staged_bytes(int block_threads, int vectors, int vector_bytes) {
  return block_threads * vectors * vector_bytes;
}

// Where this thread stages its vectors of one array: neighbouring threads' vectors lie side by side.
__device__ inline char* staged(char* stage, int slot, int vector_bytes) {
  return stage + (slot * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * vector_bytes;
}

// Starts a copy of one vector of 8, 16 or 32 bytes.
__device__ inline void copy_async(char* to, const void* from, int vector_bytes) {
  const char* bytes = static_cast<const char*>(from);
  if (vector_bytes == 8) {
    __pipeline_memcpy_async(to, bytes, 8);
  } else {
    __pipeline_memcpy_async(to, bytes, 16);
    if (vector_bytes == 32) __pipeline_memcpy_async(to + 16, bytes + 16, 16);
  }
}

// The rows of one T array: each held packed in registers, read once; or streamed, read from memory in every pass.
template <typename T, typename W>
class Row {
 public:
  __device__ Row(const void* data, int64_t cols, char* stage = nullptr)
      : data_(static_cast<const T*>(data)), cols_(cols), stage_(stage) {}

  // Starts the copy of `row` to the stage. The caller commits.
  template <typename Team>
  __device__ void prefetch(const Team& team, int64_t row) {
    if constexpr (!W::STAGED) return;
    for_each_vector<W>(team, cols_, [&](int slot, int64_t first, int) {
      copy_async(staged(stage_, slot, kBytes), data_ + row * cols_ + first, kBytes);
    });
  }

  // Makes `row` the one that get() reads. The caller has waited for its copy to the stage.
  template <typename Team>
  __device__ void read(const Team& team, int64_t row) {
    row_ = data_ + row * cols_;
    if constexpr (W::STREAMED) return;
    for_each_vector<W>(team, cols_, [&](int slot, int64_t first, int valid) {
      if constexpr (W::STAGED) {
        packed_[slot] = *reinterpret_cast<const Packed<T, W::N>*>(staged(stage_, slot, kBytes));
      } else {
        packed_[slot] = load<W::N>(row_ + first, valid, W::ALIGNED);
      }
    });
  }

  __device__ void get(int slot, int64_t first, int valid, float (&to)[W::N]) const {
    if constexpr (W::STREAMED) {
      unpack(load<W::N>(row_ + first, valid, W::ALIGNED), to);
    } else {
      unpack(packed_[slot], to);
    }
  }

 private:
  static constexpr int kBytes = sizeof(Packed<T, W::N>);

  const T* data_;
  int64_t cols_;
  char* stage_;
  const T* row_ = nullptr;
  Packed<T, W::N> packed_[W::STREAMED ? 1 : W::VECTORS];
};

// scale or bias: the same for every row, of a dtype known at run time, possibly absent.
template <typename W>
class Weight {
 public:
  __device__ Weight(const Input& weight, int64_t cols, char* stage) : weight_(weight), cols_(cols), stage_(stage) {}

  // Starts the copy to the stage. The caller commits, and waits before the first get().
  template <typename Team>
  __device__ void prefetch(const Team& team) {
    if (!W::STAGED || !weight_.data) return;
    for_each_vector<W>(team, cols_, [&](int slot, int64_t first, int) {
      copy_async(staged(stage_, slot, bytes()), static_cast<const char*>(weight_.data) + first * element(), bytes());
    });
  }

  __device__ void get(int slot, int64_t first, int valid, float (&to)[W::N]) const {
    if constexpr (W::STAGED) {
      with_type(weight_.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        unpack(*reinterpret_cast<const Packed<T, W::N>*>(staged(stage_, slot, bytes())), to);
      });
    } else {
      load_floats(weight_, first, valid, W::ALIGNED, to);
    }
  }

 private:
  __device__ int element() const { return weight_.dtype == Dtype::f32 ? 4 : 2; }
  __device__ int bytes() const { return W::N * element(); }

  Input weight_;
  int64_t cols_;
  char* stage_;
};

// A weight of type T, known when compiled, and not staged. Without a switch between dtypes in their way, the loads of
// all vectors are issued together.
template <typename T, typename W>
class PlainWeight {
 public:
  __device__ PlainWeight(const Input& weight, int64_t, char*) : data_(static_cast<const T*>(weight.data)) {}

  template <typename Team>
  __device__ void prefetch(const Team&) {}

  __device__ void get(int, int64_t first, int valid, float (&to)[W::N]) const {
    unpack(load<W::N>(data_ + first, valid, W::ALIGNED), to);
  }

 private:
  const T* data_;
};

// A thread's sum over its part of a row. Thousands of terms, as in a streamed row, need more than f32 to stay exact.
template <typename W>
using Accumulator = std::conditional_t<W::STREAMED, double, float>;

}  // namespace jaxnorm::cuda
