// Where a thread group holds scale and bias, and the sums of their gradients.
#pragma once

#include "engine/cuda/fragment.cuh"

namespace jaxnorm::cuda {

// What may be added to any float, -0.0 too, and changes nothing.
constexpr float kNothing = -0.0f;

// A vector of a weight becomes what is computed with: `offset` is added, or, of a weight that is not `there`, all are
// `absent`.
template <int N>
__device__ void complete(bool there, float offset, float absent, float (&weight)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) weight[i] = there ? weight[i] + offset : absent;
}

// Where a weight is until the row's statistics are known: still in memory, or on its way.
enum class Place : uint8_t { memory, registers, shared };

// scale or bias of type T, packed. In shared memory each thread has what it needs for itself, in the block's `space`
// for this weight, once it has waited for its copies.
template <typename T, typename Tile, Place PLACE>
class PackedWeight {
 public:
  static constexpr int kVectorBytes = Tile::N * sizeof(T);
  static constexpr int kSharedBytes = PLACE == Place::shared ? Tile::VECTORS * kVectorBytes : 0;  // of a thread

  PackedWeight() = default;

  // Loads nothing unless it is `wanted`.
  template <typename ThreadGroup>
  __device__ PackedWeight(const ThreadGroup& group, const Input& weight, bool wanted = true, char* space = nullptr)
      : weight_(static_cast<const T*>(weight.data)),
        shared_(PLACE == Place::shared ? space + threadIdx.x * kWordBytes : nullptr) {
    if constexpr (PLACE == Place::registers) {
      for_each_vector<Tile>(
          group, [&](int vec, auto col, int remaining) { packed_[vec] = fetch(col, wanted ? remaining : 0); });
    } else if constexpr (PLACE == Place::shared) {
      for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
#pragma unroll
        for (int i = 0; i < kVectorBytes / kWordBytes; ++i)
          if (wanted && remaining > (Tile::UNALIGNED ? i * kVector<T> : 0))
            copy_to_shared(word16(vec, i), weight_ + col + i * kVector<T>);
      });
    }
  }

  template <typename Column>
  __device__ void get(int vec, Column col, int remaining, float (&to)[Tile::N]) const {
    unpack(packed(vec, col, remaining), to);
  }

  template <typename Column>
  __device__ Packed<T, Tile::N> packed(int vec, Column col, int remaining) const {
    if constexpr (PLACE == Place::memory) {
      return fetch(col, remaining);
    } else if constexpr (PLACE == Place::registers) {
      return packed_[vec];
    } else {
      Packed<T, Tile::N> packed;
#pragma unroll
      for (int i = 0; i < kVectorBytes / kWordBytes; ++i)
        reinterpret_cast<uint4*>(packed.word)[i] = *reinterpret_cast<const uint4*>(word16(vec, i));
      return packed;
    }
  }

 private:
  static constexpr int kWordBytes = 16;  // words of neighbouring threads lie side by side
  static_assert(PLACE != Place::shared || kVectorBytes % kWordBytes == 0);

  // From memory.
  template <typename Column>
  __device__ Packed<T, Tile::N> fetch(Column col, int remaining) const {
    if constexpr (!Tile::UNALIGNED) {
      return load<Tile::ALIGNED, Tile::N>(weight_ + col, remaining);
    } else {
      return load_words<Tile::N>(weight_ + col, remaining);
    }
  }

  __device__ char* word16(int vec, int i) const {
    return shared_ + (vec * (kVectorBytes / kWordBytes) + i) * static_cast<int>(blockDim.x) * kWordBytes;
  }

  const T* weight_;
  char* shared_;
  Packed<T, Tile::N> packed_[PLACE == Place::registers ? Tile::VECTORS : 1];
};

// scale or bias of any type, as floats in registers for all rows of a thread group.
//
// The constructor begins to load it and `arrive` waits for it. A pipeline may be filled in between: behind the rows
// that fill one the loads would have to queue.
template <typename Tile>
class FloatWeight {
 public:
  template <typename ThreadGroup>
  __device__ FloatWeight(const ThreadGroup& group, const Input& weight) : weight_(weight) {
    if (weight.data)
      with_type(weight.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
          const T* const from = static_cast<const T*>(weight.data) + col;
          if constexpr (Tile::PIPELINED && Tile::N > 1) {
            packed_of<T>(vec) = load_now<Tile::N>(from, remaining);
          } else if constexpr (Tile::PIPELINED) {
            packed_of<T>(vec) = load<true, Tile::N>(from, remaining);
          } else {
            unpack(load<Tile::ALIGNED, Tile::N>(from, remaining), value_[vec]);
          }
        });
      });
  }

  __device__ void arrive(float offset, float absent) {
    if constexpr (Tile::PIPELINED)
      if (weight_.data)
        with_type(weight_.dtype, [&](auto* type) {
          using T = std::remove_pointer_t<decltype(type)>;
#pragma unroll
          for (int vec = 0; vec < Tile::VECTORS; ++vec) {
            const Packed<T, Tile::N> packed = packed_of<T>(vec);
            unpack(packed, value_[vec]);
          }
        });
#pragma unroll
    for (int vec = 0; vec < Tile::VECTORS; ++vec) complete(weight_.data, offset, absent, value_[vec]);
  }

  __device__ const float (&operator[](int vec) const)[Tile::N] { return value_[vec]; }

 private:
  // As it lies in memory until it has arrived, in the place of its values.
  template <typename T>
  __device__ Packed<T, Tile::N>& packed_of(int vec) {
    return reinterpret_cast<Packed<T, Tile::N>&>(value_[vec]);
  }

  const Input weight_;
  alignas(16) float value_[Tile::VECTORS][Tile::N];
};

// scale or bias of X or of f32, which is seen at run time: each has its place.
template <typename X, typename Tile, Place PLACE, Place FLOAT_PLACE>
class EitherWeight {
 public:
  template <typename Group>
  __device__ EitherWeight(const Group& group, const Input& weight, char* space = nullptr)
      : same_(group, weight, weight.data && weight.dtype == kDtype<X>, space),
        float_(group, weight, weight.data && weight.dtype != kDtype<X>, space) {}

  // As what it is, if it is of T.
  template <typename T>
  __device__ const auto& as() const {
    if constexpr (std::is_same_v<T, X>) {
      return same_;
    } else {
      return float_;
    }
  }

 private:
  const PackedWeight<X, Tile, PLACE> same_;
  const PackedWeight<float, Tile, FLOAT_PLACE> float_;
};

// Sums over the rows of a thread group have one float for each element that a thread owns. Where there are none:
struct NoColumnSums {};

// Adds up what the thread groups of a block have left in `space`, `cols` floats each, in `sums` sums: the i-th of every
// thread group whose place is i modulo `sums`. Sum 0 becomes row `first` of `to`, the others follow, all the way round.
__device__ __forceinline__ void add_up(float* space, int cols, int thread_groups, int sums, int first, float* to) {
  const int all = sums * cols;
  int count = thread_groups * cols;
  const int threads = static_cast<int>(blockDim.x), begun = threads / all * all;
  // Of fewer sums than threads several threads begin with each.
  if (begun > all && begun < count) {
    if (threadIdx.x < begun) {
      float sum = space[threadIdx.x];
#pragma unroll 4
      for (int i = threadIdx.x + begun; i < count; i += begun) sum += space[i];
      space[threadIdx.x] = sum;
    }
    count = begun;
    __syncthreads();
  }
  // Of more sums a thread has a few under way at once.
  constexpr int kAtOnce = 4;
  for (int begin = threadIdx.x; begin < all; begin += kAtOnce * threads) {
    float sum[kAtOnce] = {};
    for (int from = begin; from < count; from += all)
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (begin + i * threads < all && from + i * threads < count) sum[i] += space[from + i * threads];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = begin + i * threads + first * cols;
      if (begin + i * threads < all) to[at < all ? at : at - all] = sum[i];
    }
  }
}

template <typename Tile>
struct ColumnSums {
  float value[Tile::VECTORS][Tile::N] = {};

  // Writes those of a block or a cluster. Thread groups that share a block add up theirs in `space`, which has a float
  // for each element that the block's threads own; `sums` and `first` as in add_up.
  template <typename Group>
  __device__ void write(const Group& group, int thread_groups, int sums, int first, float* space, float* to) const {
    if (Group::kSpansBlocks || thread_groups == 1) {
      for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
        store<Tile::ALIGNED>(to + col, pack<float>(value[vec]), remaining);
      });
      return;
    }
    float* const own = space + group.place * static_cast<int>(group.end);
    for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
      if constexpr (Tile::ALIGNED) {
        if (remaining > 0) store_shared(own + col, value[vec]);
      } else {
#pragma unroll
        for (int i = 0; i < Tile::N; ++i)
          if (i < remaining) own[col + i] = value[vec][i];
      }
    });
    __syncthreads();
    add_up(space, static_cast<int>(group.end), thread_groups, sums, first, to);
    __syncthreads();  // `space` may be used again
  }
};

}  // namespace jaxnorm::cuda
