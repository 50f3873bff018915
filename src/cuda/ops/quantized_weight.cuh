// scale and bias of rows whose result is quantised: of x's type or f32, which is seen at run time.
#pragma once

#include "cuda/engine/weight.cuh"

namespace jaxnorm::cuda {

// scale + scale_offset where scale is of X, held in registers if HELD, or of f32. with(f) calls
// f(null pointer of its type, how to get a vector's factors), if there is a scale.
template <typename X, typename Tile, typename ThreadGroup, bool HELD>
class LoadedScale {
 public:
  __device__ LoadedScale(const ThreadGroup& group, const Forward& p)
      : p_(p), held_(group, p.scale, p.scale.data && p.scale.dtype == kDtype<X>), late_(group, p.scale) {}

  __device__ void arrive() {}

  template <typename F>
  __device__ void with(F f) const {
    if (!p_.scale.data) return;
    if (p_.scale.dtype == kDtype<X>) {
      f(static_cast<X*>(nullptr), factors(held_));
    } else if constexpr (sizeof(X) < 4) {
      f(static_cast<float*>(nullptr), factors(late_));
    }
  }

 private:
  template <typename Weight>
  __device__ auto factors(const Weight& weight) const {
    return [this, &weight](int slot, auto first, int left, float (&to)[Tile::N]) {
      const auto packed = weight.packed(slot, first, left);
      // Half an addition less. The branch has late loads wait for each other, which matters where the whole block does.
      if (!ThreadGroup::kSpansWarps && p_.scale_offset == 0.0f) return unpack_plus_zero(packed, to);
      unpack(packed, to);
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) to[i] += p_.scale_offset;
    };
  }

  const Forward& p_;
  const PackedWeight<X, Tile, HELD ? Place::registers : Place::memory> held_;
  const PackedWeight<float, Tile, Place::memory> late_;
};

// The same for all rows of a thread group, as floats in registers.
template <typename X, typename Tile>
class RegisterScale {
 public:
  template <typename ThreadGroup>
  __device__ RegisterScale(const ThreadGroup& group, const Forward& p) : p_(p), factor_(group, p.scale) {}

  __device__ void arrive() { factor_.arrive(p_.scale_offset, 1.0f); }

  template <typename F>
  __device__ void with(F f) const {
    const auto factors = [this](int slot, auto, int, float (&to)[Tile::N]) {
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) to[i] = factor_[slot][i];
    };
    if (p_.scale.dtype == kDtype<X>) {
      f(static_cast<X*>(nullptr), factors);
    } else {
      f(static_cast<float*>(nullptr), factors);
    }
  }

 private:
  const Forward& p_;
  FloatWeight<Tile> factor_;
};

// A bias that is loaded when it is needed.
template <typename Tile>
class LateBias {
 public:
  template <typename ThreadGroup>
  __device__ LateBias(const ThreadGroup&, const Input& bias, char* = nullptr) : bias_(bias) {}

  __device__ void arrive() {}

  // Of type T.
  template <typename T, typename ThreadGroup>
  __device__ auto of(const ThreadGroup& group) const {
    return PackedWeight<T, Tile, Place::memory>(group, bias_);
  }

 private:
  const Input bias_;
};

// The same for all rows of a thread group, in `space` of its block's shared memory.
template <typename X, typename Tile>
class SharedBias {
 public:
  template <typename ThreadGroup>
  __device__ SharedBias(const ThreadGroup& group, const Input& bias, char* space)
      : of_x_(group, bias, bias.data && bias.dtype == kDtype<X>, space),
        of_float_(group, bias, bias.data && bias.dtype != kDtype<X>, space) {}

  __device__ void arrive() { wait_for_copies(); }

  template <typename T, typename ThreadGroup>
  __device__ const auto& of(const ThreadGroup&) const {
    if constexpr (std::is_same_v<T, X>) {
      return of_x_;
    } else {
      return of_float_;
    }
  }

  // Of a thread's `space`.
  static int bytes(const Input& bias) { return bias ? Tile::VECTORS * Tile::N * size_of(bias.dtype) : 0; }

 private:
  const PackedWeight<X, Tile, Place::shared> of_x_;
  const PackedWeight<float, Tile, Place::shared> of_float_;
};

}  // namespace jaxnorm::cuda
