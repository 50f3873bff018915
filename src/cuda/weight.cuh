// scale and bias of a row, as a team holds them.
#pragma once

#include "cuda/row.cuh"

namespace jaxnorm::cuda {

// scale or bias, of type T: held packed in registers if HELD, so that it is on its way before
// the row's sums are known, or loaded as it is used.
template <typename T, typename W, bool HELD>
class PackedWeight {
 public:
  PackedWeight() = default;

  template <typename Team>
  __device__ PackedWeight(const Team& team, const Input& weight) : weight_(static_cast<const T*>(weight.data)) {
    if constexpr (HELD)
      for_each_vector<W>(
          team, [&](int slot, auto first, int left) { packed_[slot] = load<W::ALIGNED, W::N>(weight_ + first, left); });
  }

  // If it is not `wanted`, nobody will ask for it.
  template <typename Team>
  __device__ PackedWeight(const Team& team, const Input& weight, bool wanted)
      : weight_(static_cast<const T*>(weight.data)) {
    if constexpr (HELD)
      for_each_vector<W>(team, [&](int slot, auto first, int left) {
        packed_[slot] = load<W::ALIGNED, W::N>(weight_ + first, wanted ? left : 0);
      });
  }

  template <typename Column>
  __device__ void get(int slot, Column first, int left, float (&to)[W::N]) const {
    unpack(HELD ? packed_[HELD ? slot : 0] : load<W::ALIGNED, W::N>(weight_ + first, left), to);
  }

 private:
  const T* weight_;
  Packed<T, W::N> packed_[HELD ? W::VECTORS : 1];
};

// scale or bias, of any type, as floats in registers for all rows of a team, `offset` added. One that is not there is
// `absent` everywhere.
template <typename W>
class FloatWeight {
 public:
  template <typename Team>
  __device__ FloatWeight(const Team& team, const Input& weight, float offset, float absent) {
    if (weight.data)
      with_type(weight.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_each_vector<W>(team, [&](int slot, auto first, int left) {
          unpack(load<W::ALIGNED, W::N>(static_cast<const T*>(weight.data) + first, left), value_[slot]);
        });
      });
#pragma unroll
    for (int slot = 0; slot < W::VECTORS; ++slot)
#pragma unroll
      for (int i = 0; i < W::N; ++i) value_[slot][i] = weight.data ? value_[slot][i] + offset : absent;
  }

  __device__ const float (&operator[](int slot) const)[W::N] { return value_[slot]; }

 private:
  float value_[W::VECTORS][W::N];
};

}  // namespace jaxnorm::cuda
