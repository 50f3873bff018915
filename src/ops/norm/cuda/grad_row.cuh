// One row of a gradient: its sums, from which its dx follows, and its share of the sums over rows. The loops over rows
// read x and dy and compute
//
//   x_hat = s.x_hat(x)                                  s: the row's scalars, such as mean and rstd
//   g     = dy * (scale + scale_offset)                 dy, where there are no weights
//   sums  = sum of g * x_hat over the row, and of g     the second with two sums a row
//   dx    = s.dx(sums, 1 / cols)(g, x_hat)
//   dscale += dy * x_hat,  dbias += dy                  over rows
//
// An op gives a functor with these members, of which the gradient of the L2 norm in tests/toy is the shortest example:
//
//   X, DY        types of x and dy
//   State        what its kernels have to know besides GradCall; the functor is made from it
//   Scalars      of a row: x_hat(x); dx(sums, reciprocal_cols); within(remaining), which are those with which x_hat of
//                0 is 0 where no column remains; kSums, how many sums it has: 1 or 2
//   kWeights     gradients of weights that are summed up over rows: 0, 1 (dscale) or 2 (and dbias)
//   kExtra       how the extra operand is reached, if there is one
//   kTransforms  whether transform(x, dy, extra) makes what stands for x and dy above, in place, from all three; it
//                returns what is handed on to the result. Otherwise the extra operand is added to dx
//   fetch(row, s)            loads the scalars of a row
//   has_result(dx)           whether any result of rows is wanted
//   result<Tile>(dx, added, at)   stores the results of a row: at(array) is the row's place in an array of X
#pragma once

#include <cstdint>

#include "engine/cuda/weight.cuh"
#include "operands.h"
#include "ops/norm/call.h"

namespace jaxnorm::cuda {

// How a kernel reaches the extra operand, an array of x's type and shape.
enum class Extra : uint8_t { absent, in_memory, pipelined };

// A call as the kernels see it. `State`: the op's own.
template <typename State>
struct GradCall {
  int64_t rows, cols;
  Input dy, x, scale, extra;
  State state;
  Output dx;
  float scale_offset;
  int64_t dy_pad;  // elements after each row of dy
};

// What transform returns where nothing is handed on.
struct NothingKept {};

// The scalars of a row of a call; beyond the last row they stay as they are. The functor is made where it is used, so
// that what it has is read from the call's arguments then, and takes no registers before.
template <typename Op, typename Call>
__device__ void fetch_scalars(const Call& p, int64_t row, typename Op::Scalars& s) {
  if (static_cast<uint64_t>(row) < static_cast<uint64_t>(p.rows)) Op(p.state).fetch(row, s);
}

// A thread's part of the rows that an op reads, and the vectors that its sums and results are computed from.
template <typename Op, typename Tile, bool TRANSFORMS = Op::kTransforms>
struct Operands {
  Row<typename Op::X, Tile> x;
  Row<typename Op::DY, Tile> dy;

  __device__ explicit Operands(const Op&) {}

  __device__ NothingKept get(int vec, int64_t col, int remaining, float (&to_x)[Tile::N],
                             float (&to_dy)[Tile::N]) const {
    x.get(vec, col, remaining, to_x);
    dy.get(vec, col, remaining, to_dy);
    return {};
  }
};

template <typename Op, typename Tile>
struct Operands<Op, Tile, true> {
  const Op op;
  Row<typename Op::X, Tile> x;
  Row<typename Op::DY, Tile> dy;
  Row<typename Op::X, Tile> extra;

  __device__ explicit Operands(const Op& op) : op(op) {}

  __device__ auto get(int vec, int64_t col, int remaining, float (&to_x)[Tile::N], float (&to_dy)[Tile::N]) const {
    float values[Tile::N];
    x.get(vec, col, remaining, to_x);
    dy.get(vec, col, remaining, to_dy);
    extra.get(vec, col, remaining, values);
    return op.transform(to_x, to_dy, values);
  }
};

// scale + scale_offset of a row, for ops without weights.
template <typename Tile>
struct NoScale {
  struct Ones {
    __device__ constexpr float operator[](int) const { return 1.0f; }
  };
  template <typename... Args>
  __device__ explicit NoScale(const Args&...) {}
  __device__ void arrive(float, float) {}
  __device__ Ones operator[](int) const { return {}; }
};

template <typename Op, typename Tile>
using ScaleOf = std::conditional_t<(Op::kWeights > 0), FloatWeight<Tile>, NoScale<Tile>>;

// Whether vectors are finished one after the other: a branch keeps the compiler from having several under way, for
// which pipelines and two sums leave no registers.
template <typename Op, typename Tile>
constexpr bool kOneByOne = Op::Scalars::kSums == 2 && Tile::PIPELINED && Tile::N > 1;

// This warp's part of the sums of a row, whose shares of dscale and dbias are added to those.
template <typename Op, typename Tile, typename Group, typename Operands, typename Scale, typename DScale,
          typename DBias>
__device__ Sums<Op::Scalars::kSums> warp_sums(const Group& group, const typename Op::Scalars& scalars,
                                              const Operands& operands, const Scale& scale, DScale& dscale,
                                              DBias& dbias) {
  constexpr bool kTwo = Op::Scalars::kSums == 2;
  Sum<Tile> g_sum, gx_sum;
  for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
    if (kOneByOne<Op, Tile> && remaining <= 0) return;
    float x_hat[Tile::N], g[Tile::N];
    operands.get(vec, col, remaining, x_hat, g);
    const auto s = scalars.within(remaining);
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) {
      x_hat[i] = Tile::ALIGNED || i < remaining ? s.x_hat(x_hat[i]) : 0.0f;
      if constexpr (!std::is_same_v<DScale, NoColumnSums>)
        dscale.value[vec][i] = fmaf(g[i], x_hat[i], dscale.value[vec][i]);
      if constexpr (!std::is_same_v<DBias, NoColumnSums>) dbias.value[vec][i] += g[i];
      g[i] *= scale[vec][i];
    }
    if constexpr (kTwo) g_sum.add(g);
    gx_sum.add_products(g, x_hat);
  });
  Sums<Op::Scalars::kSums> sums;
  sums.value[0] = group.warp_sum(gx_sum.value());
  if constexpr (kTwo) sums.value[1] = group.warp_sum(g_sum.value());
  return sums;
}

// Computes dx of a row, which `result` stores. `sums`: of the whole row.
template <typename Op, typename Tile, typename Group, typename Operands, typename Scale, typename Result>
__device__ void finish_row(const Group& group, const typename Op::Scalars& s, const Sums<Op::Scalars::kSums>& sums,
                           const Operands& operands, const Scale& scale, const Result& result) {
  const auto dx = s.dx(sums, group.reciprocal());
  for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
    if (kOneByOne<Op, Tile> && remaining <= 0) return;
    float x_hat[Tile::N], g[Tile::N];
    const auto kept = operands.get(vec, col, remaining, x_hat, g);
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) {
      x_hat[i] = s.x_hat(x_hat[i]);
      g[i] = dx(g[i] * scale[vec][i], x_hat[i]);
    }
    result.store(kept, vec, col, remaining, g, x_hat, scale[vec]);
  });
}

// What is added to dx of a row: nothing, as the compiler knows; what a pipeline has; or what is in memory, if anything
// is.
struct NothingAdded {
  template <int N>
  __device__ void add_to(int, int64_t, int, float (&)[N]) const {}
};

template <int N>
__device__ void accumulate(float (&sum)[N], const float (&more)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] += more[i];
}

template <typename X, typename Tile>
struct PipelineAdded {
  Row<X, Tile> row;

  __device__ void add_to(int vec, int64_t col, int remaining, float (&dx)[Tile::N]) const {
    float more[Tile::N];
    row.get(vec, col, remaining, more);
    accumulate(dx, more);
  }
};

template <typename X, typename Tile>
struct MemoryAdded {
  const X* row;

  __device__ void add_to(int, int64_t col, int remaining, float (&dx)[Tile::N]) const {
    if (!row) return;
    float more[Tile::N];
    unpack(load<Tile::ALIGNED, Tile::N>(row + col, remaining), more);
    accumulate(dx, more);
  }
};

// Stores dx and what is added to it: the result of most ops.
template <typename Tile, typename X, typename Added>
struct DxResult {
  const Added added;
  X* const dx;

  template <typename Kept, typename Factor>
  __device__ void store(const Kept&, int vec, int64_t col, int remaining, float (&vector)[Tile::N],
                        const float (&)[Tile::N], const Factor&) const {
    added.add_to(vec, col, remaining, vector);
    cuda::store<Tile::ALIGNED>(dx + col, pack<X>(vector), remaining);
  }
};

// What ops have in common whose sums are of x and dy as they are, and whose result is dx.
template <typename T>
struct DxGrad {
  using X = T;
  static constexpr bool kTransforms = false;

  __device__ __host__ bool has_result(const Output& dx) const { return dx.data; }

  template <typename Tile, typename Added, typename Place>
  __device__ auto result(const Output& dx, const Added& added, const Place& at) const {
    return DxResult<Tile, X, Added>{added, at(dx.data)};
  }
};

// The gradients of RMSNorm and LayerNorm.

struct NormState {
  const float *mean, *rstd;
};

// The scalars of a row, and how x_hat and dx follow from them:
//   x_hat = (x - mean) * rstd,   dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat))     RMSNorm: no mean, no mean(g)
template <Kind KIND>
struct NormScalars {
  static constexpr bool kLayer = KIND == Kind::layer;
  static constexpr int kSums = kLayer ? 2 : 1;
  float mean = 0, rstd = 0;

  __device__ float x_hat(float x) const { return (kLayer ? x - mean : x) * rstd; }

  // Past the row's end x is 0, and x_hat need not be: of an infinite rstd, or of a large mean, it is not finite.
  __device__ NormScalars within(int remaining) const { return {mean, remaining > 0 ? rstd : 0.0f}; }

  // rstd comes last, as in the formula: it may be infinite, and two infinite terms have no difference.
  struct Dx {
    float rstd, mean_gx, mean_g;
    __device__ float operator()(float g, float x_hat) const {
      return rstd * fmaf(-x_hat, mean_gx, kLayer ? g - mean_g : g);
    }
  };
  __device__ Dx dx(const Sums<kSums>& sums, float reciprocal_cols) const {
    return {rstd, sums.value[0] * reciprocal_cols, kLayer ? sums.value[kSums - 1] * reciprocal_cols : 0.0f};
  }
};

// WEIGHTS: how many gradients of weights there may be. DSUM: how dsum is reached, which is added to dx.
template <Kind KIND, typename X_, typename DY_, int WEIGHTS, Extra DSUM>
struct NormGrad : NormState, DxGrad<X_> {
  using DY = DY_;
  using State = NormState;
  using Scalars = NormScalars<KIND>;
  static constexpr int kWeights = WEIGHTS;
  static constexpr Extra kExtra = DSUM;

  __device__ __host__ explicit NormGrad(const State& state) : NormState(state) {}

  __device__ void fetch(int64_t row, Scalars& s) const {
    s.rstd = rstd[row];
    if constexpr (Scalars::kLayer) s.mean = mean[row];
  }
};

}  // namespace jaxnorm::cuda
