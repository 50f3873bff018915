// Gated RMSNorm, of rows that a block holds.
#pragma once

#include "ops/norm/cuda/affine.cuh"
#include "ops/norm/cuda/plan.h"
#include "ops/shared/cuda/activation.cuh"
#include "ops/shared/cuda/stats.cuh"

namespace jaxnorm::cuda {

// Calls f(visit) for each batch of up to BATCH vectors of this thread; visit(g) calls g(i, vec, col, remaining) for
// each of its vectors, the i-th of the batch. Rows that are read again in each pass go vector by vector.
template <typename Tile, int BATCH, typename Group, typename F>
__device__ void for_each_batch(const Group& group, F f) {
  if constexpr (!Tile::KEPT) {
    for_each_vector<Tile>(group,
                          [&](int vec, auto col, int remaining) { f([&](auto g) { g(0, vec, col, remaining); }); });
  } else {
#pragma unroll
    for (int begin = 0; begin < Tile::VECTORS; begin += BATCH)
      f([&](auto g) {
        for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
          if (vec >= begin && vec < begin + BATCH) g(vec - begin, vec, col, remaining);
        });
      });
  }
}

// What is normalised of a row, h = FIRST ? x * activation(gate) : x. Where the gate comes first h is held as floats: a
// half type's take the registers of x and gate. Otherwise x and gate are held packed, or, of long rows, for whose gate
// there are no registers, it is only brought near.
template <typename X, typename Tile, bool FIRST>
class GatedRow {
 public:
  static constexpr bool HELD = FIRST || Tile::VECTORS <= 4 || sizeof(X) < 4;
  // Vectors on their way. Eight of floats leave room for one gate.
  static constexpr int AT_ONCE = FIRST && Tile::VECTORS == 8 && sizeof(X) == 4 ? 1 : min_of(4, Tile::VECTORS);

  template <typename Group>
  __device__ void read(const Group& group, const X* x, const X* gate, Activation activation) {
    x_ = x, gate_ = gate;
    activation_ = activation;
    if constexpr (Tile::KEPT)
      for_each_batch<Tile, AT_ONCE>(group, [&](auto visit) {
        [[maybe_unused]] Packed<X, Tile::N> gates[AT_ONCE];
        visit([&](int i, int vec, auto col, int remaining) {
          held_[vec] = load_now<Tile::N>(x + col, remaining);
          if constexpr (FIRST) {
            gates[i] = load_now<Tile::N>(gate + col, remaining);
          } else if constexpr (HELD) {
            held_gate_[vec] = load_now<Tile::N>(gate + col, remaining);
          } else if (remaining > 0) {
            prefetch(gate + col);
          }
        });
        if constexpr (FIRST) visit([&](int i, int vec, auto, int) { multiply(held_[vec], gates[i], value_[vec]); });
      });
  }

  // x in memory.
  __device__ const X* data() const { return x_; }

  // h. Columns past the row's end are zero.
  __device__ void get(int vec, int64_t col, int remaining, float (&to)[Tile::N]) const {
    if constexpr (!Tile::KEPT) {
      const Packed<X, Tile::N> x = load<Tile::ALIGNED, Tile::N>(x_ + col, remaining);
      if constexpr (FIRST) {
        multiply(x, load<Tile::ALIGNED, Tile::N>(gate_ + col, remaining), to);
      } else {
        unpack(x, to);
      }
    } else if constexpr (FIRST) {
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) to[i] = value_[vec][i];
    } else {
      unpack(held_[vec], to);
    }
  }

  // Multiplies y by the gate's activation, unless h has it.
  __device__ void finish(int vec, int64_t col, int remaining, float (&y)[Tile::N]) const {
    if constexpr (FIRST) return;
    float gate[Tile::N];
    if constexpr (Tile::KEPT && HELD) {
      unpack(held_gate_[vec], gate);
    } else {
      unpack(load<Tile::ALIGNED, Tile::N>(gate_ + col, remaining), gate);
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

template <typename X, typename Tile, bool FIRST>
struct LoadGated {
  using Fragment = GatedRow<X, Tile, FIRST>;

  template <typename P, typename Group, typename Batch>
  __device__ static void read(const P& p, const Group& group, Batch& rows) {
#pragma unroll
    for (int r = 0; r < Batch::kRows; ++r) {
      const int64_t start = rows.row_to_read(r) * p.cols;
      const X* x = static_cast<const X*>(p.x.data) + start;
      if constexpr (Tile::N > 1) hide(x);
      rows.x[r].read(group, x, static_cast<const X*>(p.gate.data.data) + start, p.gate.activation);
    }
  }
};

// Calls f with a null pointer of a weight's type: W or float, or any if W is AnyElement.
template <typename W, typename F>
__device__ void with_weight_type(Dtype dtype, F f) {
  if constexpr (std::is_same_v<W, AnyElement>) {
    with_type(dtype, f);
  } else {
    if constexpr (sizeof(W) < 4)
      if (dtype == kDtype<W>) return f(static_cast<W*>(nullptr));
    f(static_cast<float*>(nullptr));
  }
}

// Calls write(vec, col, remaining, y) with each vector of y, for a row of scale of a type as with_weight_type has it.
// It is loaded several vectors at once, or each would wait for the branch before it.
template <typename W, typename Tile, typename P, typename Group, typename Statistics, typename Row, typename F>
__device__ void for_each_result(const P& p, const Group& group, const Statistics& s, const Row& row, const Input& scale,
                                F write) {
  constexpr int kBatch = !Tile::KEPT || Tile::VECTORS == 1 || Tile::VECTORS * Tile::N > 32 ? 1 : 2;
  for_each_batch<Tile, kBatch>(group, [&](auto visit) {
    float factor[kBatch][Tile::N];
    if (scale.data)
      with_weight_type<W>(scale.dtype, [&](auto* type) {
        const auto* const data = static_cast<const std::remove_pointer_t<decltype(type)>*>(scale.data);
        visit([&](int i, int, auto col, int remaining) {
          unpack(load<Tile::ALIGNED, Tile::N>(data + col, remaining), factor[i]);
        });
      });
    visit([&](int i, int vec, auto col, int remaining) {
      float values[Tile::N];
      row.get(vec, col, remaining, values);
      complete(scale.data, p.scale_offset, 1.0f, factor[i]);
#pragma unroll
      for (int e = 0; e < Tile::N; ++e) values[e] = affine<false>(s.x_hat(values[e]), factor[i][e], 0);
      row.finish(vec, col, remaining, values);
      write(vec, col, remaining, values);
    });
  });
}

// Writes y.
template <typename Op, typename R, typename Tile>
struct GatedEpilogue : RowEpilogue {
  using X = typename Op::Stream;

  template <typename P, typename Group, typename Rows>
  __device__ GatedEpilogue(const P&, const RowsLaunch&, const Group&, const Rows&) {}

  template <typename P, typename Group, typename Rows>
  __device__ __forceinline__ void finish(const P& p, const RowsLaunch& launch, const Group& group, Rows& rows) {
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      if (!rows.is_written(r)) break;
      X* y = static_cast<X*>(p.y.data) + rows.row(r) * p.cols;
      hide(y);
      const Input scale = from(p.scale, launch.weight_rows.of_row(rows.row(r)) * p.cols);
      for_each_result<AnyElement, Tile>(p, group, rows.s[r], rows.x[r], scale,
                                        [&](int, auto col, int remaining, const float (&values)[Tile::N]) {
                                          store<Tile::ALIGNED>(y + col, pack<X>(values), remaining);
                                        });
    }
  }
};

template <typename X, bool FIRST>
struct GatedNormOp : RowOp<X, MeanSquare, 2> {
  using Params = GatedNormForward;
  template <typename Tile>
  using Load = LoadGated<X, Tile, FIRST>;
  template <typename R, typename Tile>
  using Epilogue = GatedEpilogue<GatedNormOp, R, Tile>;
};

// y of N columns with a scale of any type. `at` and `weights_at` count elements from the beginning of x and of scale.
template <typename X, int N, typename P, typename Statistics>
__device__ void any_gated_result(const P& p, const Statistics& s, int64_t at, int64_t weights_at, float (&y)[N]) {
  float a[N], factor[N];
  unpack(load<true, N>(static_cast<const X*>(p.x.data) + at, N), y);
  unpack(load<true, N>(static_cast<const X*>(p.gate.data.data) + at, N), a);
  if (p.scale.data) load_floats<true>(p.scale, weights_at, N, factor);
  complete(p.scale.data, p.scale_offset, 1.0f, factor);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    a[i] = activate<X>(p.gate.activation, a[i]);
    const float h = p.gate.first ? y[i] * a[i] : y[i];
    y[i] = affine<false>(s.x_hat(h), factor[i], 0);
    if (!p.gate.first) y[i] *= a[i];
  }
}

// Whether vectors of N serve what is read.
template <int N, typename P>
bool read_is_aligned(const P& p) {
  return p.cols % N == 0 && are_aligned<N>(p.x, p.gate.data, p.scale);
}

// Calls f with whether what is normalised is multiplied first, as a constant.
template <typename P, typename F>
cudaError_t with_order(const P& p, F f) {
  return p.gate.first ? f(std::true_type{}) : f(std::false_type{});
}

template <typename X, bool FIRST>
cudaError_t gated_norm_as(const GatedNormForward& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const Plan plan = make_gated_forward_plan(kDtype<X>, p.cols, FIRST);
  const bool is_aligned = read_is_aligned<N>(p) && are_aligned<N>(p.y);
  return with_regime<GatedForwardRegimes<sizeof(X), FIRST>>(plan, [&](auto regime) {
    RowsLaunch launch(plan, p.cols, N, p.weight_rows);
    return RowLauncher<GatedNormOp<X, FIRST>, decltype(regime)>{p, plan, launch, stream}.run(is_aligned);
  });
}

template <typename X>
cudaError_t run_gated_norm(const GatedNormForward& p, cudaStream_t stream) {
  return with_order(p, [&](auto first) { return gated_norm_as<X, first.value>(p, stream); });
}

}  // namespace jaxnorm::cuda
