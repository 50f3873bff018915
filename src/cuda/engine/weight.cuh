// scale and bias of a row, as a thread group holds them.
#pragma once

#include "cuda/engine/fragment.cuh"

namespace jaxnorm::cuda {

// Where a weight is while the row's sums are not known yet: still where it was, or on its way.
enum class Place : uint8_t { memory, registers, shared };

// scale or bias, of type T. In shared memory, of which `space` is the block's for this weight, a thread has what it
// needs for itself, and may have it once it has waited for its copies.
template <typename T, typename Tile, Place PLACE>
class PackedWeight {
 public:
  static constexpr int kVectorBytes = Tile::N * sizeof(T);
  static constexpr int kSharedBytes = PLACE == Place::shared ? Tile::VECTORS * kVectorBytes : 0;  // of a thread

  PackedWeight() = default;

  // If it is not `wanted`, nobody will ask for it, and nothing is loaded.
  template <typename ThreadGroup>
  __device__ PackedWeight(const ThreadGroup& group, const Input& weight, bool wanted = true, char* space = nullptr)
      : weight_(static_cast<const T*>(weight.data)),
        shared_(PLACE == Place::shared ? space + threadIdx.x * kWordBytes : nullptr) {
    if constexpr (PLACE == Place::registers) {
      for_each_vector<Tile>(group,
                            [&](int slot, auto first, int left) { packed_[slot] = fetch(first, wanted ? left : 0); });
    } else if constexpr (PLACE == Place::shared) {
      for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
#pragma unroll
        for (int i = 0; i < kVectorBytes / kWordBytes; ++i)
          if (wanted && left > (Tile::UNALIGNED ? i * kVector<T> : 0))
            copy_to_shared(word16(slot, i), weight_ + first + i * kVector<T>);
      });
    }
  }

  template <typename Column>
  __device__ void get(int slot, Column first, int left, float (&to)[Tile::N]) const {
    unpack(packed(slot, first, left), to);
  }

  template <typename Column>
  __device__ Packed<T, Tile::N> packed(int slot, Column first, int left) const {
    if constexpr (PLACE == Place::memory) {
      return fetch(first, left);
    } else if constexpr (PLACE == Place::registers) {
      return packed_[slot];
    } else {
      Packed<T, Tile::N> packed;
#pragma unroll
      for (int i = 0; i < kVectorBytes / kWordBytes; ++i)
        reinterpret_cast<uint4*>(packed.word)[i] = *reinterpret_cast<const uint4*>(word16(slot, i));
      return packed;
    }
  }

 private:
  static constexpr int kWordBytes = 16;  // bytes: those of neighbouring threads lie side by side
  static_assert(PLACE != Place::shared || kVectorBytes % kWordBytes == 0);

  // From memory, of which 16-byte words are read that have any of the elements.
  template <typename Column>
  __device__ Packed<T, Tile::N> fetch(Column first, int left) const {
    if constexpr (!Tile::UNALIGNED) {
      return load<Tile::ALIGNED, Tile::N>(weight_ + first, left);
    } else {
      return load_words<Tile::N>(weight_ + first, left);
    }
  }

  __device__ char* word16(int slot, int i) const {
    return shared_ + (slot * (kVectorBytes / kWordBytes) + i) * static_cast<int>(blockDim.x) * kWordBytes;
  }

  const T* weight_;
  char* shared_;
  Packed<T, Tile::N> packed_[PLACE == Place::registers ? Tile::VECTORS : 1];
};

// scale or bias, of any type, as floats in registers for all rows of a thread group, `offset` added. One that is not
// there is `absent` everywhere.
//
// Its constructor begins to load it and `arrive` waits for it, so that a pipeline may be filled up in between: behind
// the rows that fill one it would have to queue.
template <typename Tile>
class FloatWeight {
 public:
  template <typename ThreadGroup>
  __device__ FloatWeight(const ThreadGroup& group, const Input& weight) : weight_(weight) {
    if (weight.data)
      with_type(weight.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
          const T* const from = static_cast<const T*>(weight.data) + first;
          if constexpr (Tile::PIPELINED && Tile::N > 1) {
            packed_of<T>(slot) = load_now<Tile::N>(from, left);
          } else if constexpr (Tile::PIPELINED) {
            packed_of<T>(slot) = load<true, Tile::N>(from, left);
          } else {
            unpack(load<Tile::ALIGNED, Tile::N>(from, left), value_[slot]);
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
          for (int slot = 0; slot < Tile::VECTORS; ++slot) {
            const Packed<T, Tile::N> packed = packed_of<T>(slot);
            unpack(packed, value_[slot]);
          }
        });
#pragma unroll
    for (int slot = 0; slot < Tile::VECTORS; ++slot)
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) value_[slot][i] = weight_.data ? value_[slot][i] + offset : absent;
  }

  __device__ const float (&operator[](int slot) const)[Tile::N] { return value_[slot]; }

 private:
  // As it lies in memory, until it has arrived, where its values will be.
  template <typename T>
  __device__ Packed<T, Tile::N>& packed_of(int slot) {
    return reinterpret_cast<Packed<T, Tile::N>&>(value_[slot]);
  }

  const Input weight_;
  alignas(16) float value_[Tile::VECTORS][Tile::N];
};

}  // namespace jaxnorm::cuda
