// A row and its gate in the forward: what is normalised of it, and the weights and the gate that follow.
#pragma once

#include "cuda/ops/activation.cuh"
#include "cuda/ops/forward_row.cuh"

namespace jaxnorm::cuda {

// A call with a gate; FIRST: which is applied before the norm. Weights may be of any type.
template <bool FIRST>
struct GatedCall {
  static constexpr bool kSpecialised = false, kAdds = false, kGates = true, kFirst = FIRST;
  template <typename X>
  using Result = X;
};

// Calls f(visit) for each batch of up to BATCH vectors of this thread; visit(g) calls g(i, slot, first, left) for each
// of its vectors, the i-th of the batch. Rows that are read again in each pass go vector by vector.
template <typename Tile, int BATCH, typename ThreadGroup, typename F>
__device__ void for_each_batch(const ThreadGroup& group, F f) {
  if constexpr (!Tile::KEPT) {
    for_each_vector<Tile>(group, [&](int slot, auto first, int left) { f([&](auto g) { g(0, slot, first, left); }); });
  } else {
#pragma unroll
    for (int begin = 0; begin < Tile::VECTORS; begin += BATCH)
      f([&](auto g) {
        for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
          if (slot >= begin && slot < begin + BATCH) g(slot - begin, slot, first, left);
        });
      });
  }
}

// h = FIRST ? x * activation(gate) : x of a row. Where the gate comes first h is held as floats: a half type's take the
// registers of x and gate. Otherwise x and gate are held packed, or, of long rows, for whose gate there are no
// registers, it is only brought near.
template <typename X, typename Tile, bool FIRST>
class GatedRow {
 public:
  static constexpr bool HELD = FIRST || Tile::VECTORS <= 4 || sizeof(X) < 4;
  // Vectors on their way. Eight of floats leave room for one gate.
  static constexpr int AT_ONCE = FIRST && Tile::VECTORS == 8 && sizeof(X) == 4 ? 1 : min_of(4, Tile::VECTORS);

  template <typename ThreadGroup>
  __device__ void read(const ThreadGroup& group, const X* x, const X* gate, Activation activation) {
    x_ = x, gate_ = gate;
    activation_ = activation;
    if constexpr (Tile::KEPT)
      for_each_batch<Tile, AT_ONCE>(group, [&](auto visit) {
        [[maybe_unused]] Packed<X, Tile::N> gates[AT_ONCE];
        visit([&](int i, int slot, auto first, int left) {
          held_[slot] = load_now<Tile::N>(x + first, left);
          if constexpr (FIRST) {
            gates[i] = load_now<Tile::N>(gate + first, left);
          } else if constexpr (HELD) {
            held_gate_[slot] = load_now<Tile::N>(gate + first, left);
          } else if (left > 0) {
            prefetch(gate + first);
          }
        });
        if constexpr (FIRST) visit([&](int i, int slot, auto, int) { multiply(held_[slot], gates[i], value_[slot]); });
      });
  }

  // h. Columns past the row's end are zero.
  __device__ void get(int slot, int64_t first, int left, float (&to)[Tile::N]) const {
    if constexpr (!Tile::KEPT) {
      const Packed<X, Tile::N> x = load<Tile::ALIGNED, Tile::N>(x_ + first, left);
      if constexpr (FIRST) {
        multiply(x, load<Tile::ALIGNED, Tile::N>(gate_ + first, left), to);
      } else {
        unpack(x, to);
      }
    } else if constexpr (FIRST) {
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) to[i] = value_[slot][i];
    } else {
      unpack(held_[slot], to);
    }
  }

  // Multiplies y by the gate's activation, unless h has it.
  __device__ void finish(int slot, int64_t first, int left, float (&y)[Tile::N]) const {
    if constexpr (FIRST) return;
    float gate[Tile::N];
    if constexpr (Tile::KEPT && HELD) {
      unpack(held_gate_[slot], gate);
    } else {
      unpack(load<Tile::ALIGNED, Tile::N>(gate_ + first, left), gate);
    }
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) y[i] *= activate<X>(activation_, gate[i]);
  }

 private:
  __device__ void multiply(const Packed<X, Tile::N>& x, const Packed<X, Tile::N>& gate, float (&to)[Tile::N]) const {
    float factor[Tile::N];
    unpack(x, to);
    unpack(gate, factor);
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) to[i] *= activate<X>(activation_, factor[i]);
  }

  static constexpr int HELD_X = Tile::KEPT ? Tile::VECTORS : 1,
                       HELD_GATES = Tile::KEPT && !FIRST && HELD ? Tile::VECTORS : 1;

  const X *x_ = nullptr, *gate_ = nullptr;
  Activation activation_ = Activation::silu;
  Packed<X, Tile::N> held_[HELD_X], held_gate_[HELD_GATES];
  float value_[FIRST ? HELD_X : 1][Tile::N];
};

// y of a row: weights of any type are loaded several vectors at once, or each would wait for the branch before it.
template <typename Tile, typename X, typename T, bool FIRST>
__device__ void finish_gated(const Forward& p, const T& group, Statistics s, const GatedRow<X, Tile, FIRST>& row,
                             const Input& scale, X* y) {
  constexpr int kBatch = !Tile::KEPT || Tile::VECTORS == 1 || Tile::VECTORS * Tile::N > 32 ? 1 : 2;
  for_each_batch<Tile, kBatch>(group, [&](auto visit) {
    float factor[kBatch][Tile::N];
    if (scale.data)
      with_type(scale.dtype, [&](auto* type) {
        const auto* const data = static_cast<const std::remove_pointer_t<decltype(type)>*>(scale.data);
        visit([&](int i, int, auto first, int left) {
          unpack(load<Tile::ALIGNED, Tile::N>(data + first, left), factor[i]);
        });
      });
    visit([&](int i, int slot, auto first, int left) {
      float values[Tile::N];
      row.get(slot, first, left, values);
#pragma unroll
      for (int e = 0; e < Tile::N; ++e)
        values[e] = values[e] * s.rstd * (scale.data ? factor[i][e] + p.scale_offset : 1.0f);
      row.finish(slot, first, left, values);
      store<Tile::ALIGNED>(y + first, pack<X>(values), left);
    });
  });
}

}  // namespace jaxnorm::cuda
