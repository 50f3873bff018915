// scale and bias of rows whose result is quantised: of x's type or f32, which is seen at run time.
#pragma once

#include "cuda/weight.cuh"

namespace jaxnorm::cuda {

// scale + scale_offset where scale is of X, held in registers if HELD, or of f32. with(f) calls
// f(null pointer of its type, how to get a vector's factors), if there is a scale.
template <typename X, typename W, typename Team, bool HELD>
class LoadedScale {
 public:
  __device__ LoadedScale(const Team& team, const Forward& p)
      : p_(p), held_(team, p.scale, p.scale.data && p.scale.dtype == kDtype<X>), late_(team, p.scale) {}

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
    return [this, &weight](int slot, auto first, int left, float (&to)[W::N]) {
      const auto packed = weight.packed(slot, first, left);
      // Half an addition less. The branch has late loads wait for each other, which matters where the whole block does.
      if (!Team::kSpansWarps && p_.scale_offset == 0.0f) return unpack_plus_zero(packed, to);
      unpack(packed, to);
#pragma unroll
      for (int i = 0; i < W::N; ++i) to[i] += p_.scale_offset;
    };
  }

  const Forward& p_;
  const PackedWeight<X, W, HELD ? Place::registers : Place::memory> held_;
  const PackedWeight<float, W, Place::memory> late_;
};

// The same for all rows of a team, as floats in registers.
template <typename X, typename W>
class RegisterScale {
 public:
  template <typename Team>
  __device__ RegisterScale(const Team& team, const Forward& p) : p_(p), factor_(team, p.scale) {}

  __device__ void arrive() { factor_.arrive(p_.scale_offset, 1.0f); }

  template <typename F>
  __device__ void with(F f) const {
    const auto factors = [this](int slot, auto, int, float (&to)[W::N]) {
#pragma unroll
      for (int i = 0; i < W::N; ++i) to[i] = factor_[slot][i];
    };
    if (p_.scale.dtype == kDtype<X>) {
      f(static_cast<X*>(nullptr), factors);
    } else {
      f(static_cast<float*>(nullptr), factors);
    }
  }

 private:
  const Forward& p_;
  FloatWeight<W> factor_;
};

// A bias that is loaded when it is needed.
template <typename W>
class LateBias {
 public:
  template <typename Team>
  __device__ LateBias(const Team&, const Input& bias, char* = nullptr) : bias_(bias) {}

  __device__ void arrive() {}

  // Of type T.
  template <typename T, typename Team>
  __device__ auto of(const Team& team) const {
    return PackedWeight<T, W, Place::memory>(team, bias_);
  }

 private:
  const Input bias_;
};

// The same for all rows of a team, in `space` of its block's shared memory.
template <typename X, typename W>
class SharedBias {
 public:
  template <typename Team>
  __device__ SharedBias(const Team& team, const Input& bias, char* space)
      : of_x_(team, bias, bias.data && bias.dtype == kDtype<X>, space),
        of_float_(team, bias, bias.data && bias.dtype != kDtype<X>, space) {}

  __device__ void arrive() { wait_for_copies(); }

  template <typename T, typename Team>
  __device__ const auto& of(const Team&) const {
    if constexpr (std::is_same_v<T, X>) {
      return of_x_;
    } else {
      return of_float_;
    }
  }

  // Of a thread's `space`.
  static int bytes(const Input& bias) { return bias ? W::VECTORS * W::N * size_of(bias.dtype) : 0; }

 private:
  const PackedWeight<X, W, Place::shared> of_x_;
  const PackedWeight<float, W, Place::shared> of_float_;
};

}  // namespace jaxnorm::cuda
