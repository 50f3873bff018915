// The rows of two arrays that a thread group has next, on their way. Each thread has what it copies for itself, so that
// nobody has to wait for others.
#pragma once

#include "engine/cuda/pair_tiling.cuh"
#include "engine/cuda/ptx.cuh"

namespace jaxnorm::cuda {

// A row of each array, and of the first one's statistics, which come as `SCALARS` arrays. `row`: which of the second,
// where it lies `further` rows further.
template <typename X, typename Tile, int SCALARS>
struct RowPair {
  PairRow<X, Tile> first, second;
  float scalar[SCALARS];
  int row;
  bool is_there;
};

template <typename X, int SCALARS>
struct RowPairArrays {
  const X *first, *second;
  const float* scalar[SCALARS];
};

// One row, in registers.
template <typename X, typename Tile, int SCALARS>
struct HeldRows {
  static constexpr int kAhead = 1, kSharedBytes = 0;
  RowPair<X, Tile, SCALARS> held;

  __device__ explicit HeldRows(char*) {}

  template <typename Group>
  __device__ __forceinline__ void push(const RowPairArrays<X, SCALARS>& from, const Group& group, int row, int further,
                                       bool is_there) {
    const int64_t at = int64_t{row} * group.end;
    held.row = row + further;
    held.is_there = is_there;
    held.first.read(group, from.first + at, is_there);
    held.second.read(group, from.second + int64_t{further} * group.end + at, is_there);
#pragma unroll
    for (int i = 0; i < SCALARS; ++i) held.scalar[i] = is_there ? __ldg(from.scalar[i] + row) : 0.0f;
  }

  __device__ __forceinline__ RowPair<X, Tile, SCALARS> pop() { return held; }
};

// A few rows, in shared memory. THREADS: of a block.
template <typename X, typename Tile, int SCALARS, int THREADS>
class StagedRows {
  static constexpr int kVectorBytes = Tile::N * sizeof(X), kLastBytes = 16;  // the last word has scalars, and the row
  static constexpr int kStageBytes = (2 * Tile::VECTORS * kVectorBytes + kLastBytes) * THREADS;
  static constexpr int kStages = kStageBytes > 15 << 10 ? 2 : (30 << 10) / kStageBytes;
  static_assert(SCALARS <= 2);

 public:
  static constexpr int kAhead = kStages - 1, kSharedBytes = kStages * kStageBytes;

  __device__ explicit StagedRows(char* shared) : begin_(shared) {}

  template <typename Group>
  __device__ __forceinline__ void push(const RowPairArrays<X, SCALARS>& from, const Group& group, int row, int further,
                                       bool is_there) {
    char* const stage = begin_ + next_ * kStageBytes;
    const int64_t at = int64_t{row} * group.end;
    const X* second = from.second + int64_t{further} * group.end;
    hide(second);  // or the compiler would keep the columns of both arrays
    for_each_vector<Tile>(group, [&](int vec, int col, int remaining) {
      copy_or_clear<kVectorBytes>(vector(stage, 2 * vec), from.first + (at + col), is_there && remaining > 0);
      copy_or_clear<kVectorBytes>(vector(stage, 2 * vec + 1), second + (at + col), is_there && remaining > 0);
    });
    char* const last = last_word(stage);
#pragma unroll
    for (int i = 0; i < SCALARS; ++i) copy_or_clear<4>(last + 4 + 4 * i, from.scalar[i] + row, is_there);
    *reinterpret_cast<int*>(last) = is_there ? row + further : -1;
    commit_copies();
    next_ = next_ == kStages - 1 ? 0 : next_ + 1;
  }

  // The one that was pushed first, once as many were pushed as there may be.
  __device__ __forceinline__ RowPair<X, Tile, SCALARS> pop() {
    wait_for_copies_but<kAhead - 1>();
    const char* const stage = begin_ + oldest_ * kStageBytes;
    RowPair<X, Tile, SCALARS> pair;
#pragma unroll
    for (int vec = 0; vec < Tile::VECTORS; ++vec) {
      pair.first.packed[vec] = load_shared<Tile::N>(reinterpret_cast<const X*>(vector(stage, 2 * vec)));
      pair.second.packed[vec] = load_shared<Tile::N>(reinterpret_cast<const X*>(vector(stage, 2 * vec + 1)));
    }
    const uint4 last = *reinterpret_cast<const uint4*>(last_word(stage));
    pair.row = static_cast<int>(last.x);
    pair.is_there = pair.row >= 0;
    const uint32_t scalars[] = {last.y, last.z};
#pragma unroll
    for (int i = 0; i < SCALARS; ++i) pair.scalar[i] = __uint_as_float(scalars[i]);
    oldest_ = oldest_ == kStages - 1 ? 0 : oldest_ + 1;
    return pair;
  }

 private:
  template <typename Char>
  __device__ static Char* vector(Char* stage, int i) {
    return stage + (i * THREADS + threadIdx.x) * kVectorBytes;
  }
  template <typename Char>
  __device__ static Char* last_word(Char* stage) {
    return stage + 2 * Tile::VECTORS * THREADS * kVectorBytes + threadIdx.x * kLastBytes;
  }

  char* const begin_;
  int next_ = 0, oldest_ = 0;
};

template <typename X, typename Tile, int SCALARS, int THREADS>
using RowQueue = std::conditional_t<Tile::ALIGNED && Tile::N * sizeof(X) >= 4, StagedRows<X, Tile, SCALARS, THREADS>,
                                    HeldRows<X, Tile, SCALARS>>;

}  // namespace jaxnorm::cuda
