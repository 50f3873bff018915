// A row as a team sees it: cut into vectors of N elements. Each warp of the team owns neighbouring vectors, and of
// these lane i owns vectors i, i + 32, ... A row that is streamed is dealt out to all threads of the team in turns.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/ring.cuh"
#include "cuda/team.cuh"
#include "cuda/vector.cuh"

namespace jaxnorm::cuda {

// How a kernel walks rows of X in regime R. As the compiler knows ACCESS, the checks are gone where every vector is
// whole.
template <typename X, typename R, Access ACCESS>
struct Walk {
  static constexpr int N = ACCESS >= Access::ring_elements ? 1 : kVector<X>;
  static constexpr int VECTORS = R::kVectors * kVector<X> / N;
  static constexpr int LANES = R::kThreads > 0 ? R::kThreads : kWarp;  // of a warp that share a row
  static constexpr int STRIDE = N * LANES;                             // columns from a thread's vector to its next
  static constexpr bool ALIGNED = ACCESS != Access::unaligned, STREAMED = VECTORS == kStreamed;
  static constexpr bool RING = ACCESS == Access::ring || ACCESS == Access::ring_elements;
  static constexpr bool KEPT = !STREAMED;  // whether a row is read once and is at hand then
};

// The same vectors in the same order, so that sums have the same bits, but read again in each pass: in little code.
template <typename X, typename R, Access ACCESS>
struct WalkAgain : Walk<X, R, ACCESS> {
  static constexpr bool RING = false, KEPT = false;
};

// The columns of its block's share before a thread's first.
template <typename W, typename Team>
__device__ int first_of_thread(const Team& team) {
  return team.rank / W::LANES * W::VECTORS * W::STRIDE + team.rank % W::LANES * W::N;
}

// Calls f(slot, first, left) for each vector of this thread: `slot` counts them (a constant once unrolled, so that it
// may index registers), `first` is the vector's first column, `left` how many columns the row has from there on: none
// is left (zero or less) where a team has more vectors than the row. All threads of a team call f equally often.
template <typename W, typename Team, typename F>
__device__ void for_each_vector(const Team& team, F f) {
  constexpr int N = W::N;
  if constexpr (W::STREAMED) {
    const int64_t step = static_cast<int64_t>(team.threads) * N;
    for (int64_t turn = team.begin; turn < team.end; turn += step) {
      const int64_t first = turn + static_cast<int64_t>(team.rank) * N;
      f(0, first, static_cast<int>(min(static_cast<int64_t>(N), team.end - first)));
    }
  } else {
    const int first = static_cast<int>(team.begin) + first_of_thread<W>(team), end = static_cast<int>(team.end);
    const auto visit = [&](int slot) {
      const int at = first + slot * W::STRIDE;
      f(slot, at, end - at);
    };
    if constexpr (W::KEPT) {
#pragma unroll
      for (int slot = 0; slot < W::VECTORS; ++slot) visit(slot);
    } else {
#pragma unroll 1
      for (int slot = 0; slot < W::VECTORS; ++slot) visit(slot);
    }
  }
}

// How many columns of its block's share the team's threads in this warp have.
template <typename W, typename Team>
__device__ float warp_cols(const Team& team) {
  const int64_t cols = team.end - team.begin;
  if constexpr (!Team::kSpansWarps) {
    return cols;
  } else if constexpr (W::STREAMED) {
    // Turns are all whole but the last. A warp's share of the last is cut off at its end.
    constexpr int64_t share = kWarp * W::N;
    const int64_t turn = int64_t{team.threads} * W::N, turns = cols / turn;
    const int64_t rest = cols - turns * turn - team.rank / kWarp * share;
    return turns * share + max(int64_t{0}, min(share, rest));
  } else {
    constexpr int share = kWarp * W::N * W::VECTORS;
    return max(0, min(share, static_cast<int>(cols) - team.rank / kWarp * share));
  }
}

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
