// One row in the backward: its sums, from which its dx follows, and its share of the sums over rows.
#pragma once

#include "cuda/engine/weight.cuh"

namespace jaxnorm::cuda {

struct RowStatistics {
  float mean = 0, rstd = 0;

  template <Kind KIND>
  __device__ float x_hat(float x) const {
    return (KIND == Kind::layer ? x - mean : x) * rstd;
  }

  // For sums in which what is past the row's end has no part, being multiplied by 0, as long as x_hat is finite there,
  // where x is 0. A mean so large may belong to a row whose numbers are all alike, or rstd is 0: of any deviation from
  // it the square is infinite. So within the row x_hat stays what it is.
  __device__ RowStatistics bounded() const { return {mean, fabsf(mean) > 1e27f && rstd > 1.0f ? 1.0f : rstd}; }

  // P has a member for each.
  template <Kind KIND, typename P>
  __device__ void fetch(const P& p, int64_t row) {
    if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(p.rows)) return;
    rstd = p.rstd[row];
    if (KIND == Kind::layer) mean = p.mean[row];
  }
};

// Of a row or a part of it: the sum of g * x_hat and, for layer norm, of g.
template <Kind KIND>
using RowSums = Sums<KIND == Kind::layer ? 2 : 1>;

// Adds up what the `thread groups` of a block have left in `space`, `cols` floats each: `sums` sums, each of every
// sums-th thread group. The first takes place `first`, those after it the next, all the way round.
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

// The running sums of a thread group's rows, one float for each element that a thread owns.
template <typename Tile>
struct ColumnSums {
  float value[Tile::VECTORS][Tile::N] = {};

  // Writes those of a block or a cluster: thread groups that share a block add up theirs in `space`, a float for each
  // element that the block's threads own. `sums` and `first` are what they are for add_up.
  template <typename ThreadGroup>
  __device__ void write(const ThreadGroup& group, int thread_groups, int sums, int first, float* space,
                        float* to) const {
    if (ThreadGroup::kSpansBlocks || thread_groups == 1) {
      for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
        store<Tile::ALIGNED>(to + first, pack<float>(value[slot]), left);
      });
      return;
    }
    float* const own = space + group.place * static_cast<int>(group.end);
    for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
      if constexpr (Tile::ALIGNED) {
        if (left > 0) store_shared(own + first, value[slot]);
      } else {
#pragma unroll
        for (int i = 0; i < Tile::N; ++i)
          if (i < left) own[first + i] = value[slot][i];
      }
    });
    __syncthreads();
    add_up(space, static_cast<int>(group.end), thread_groups, sums, first, to);
    __syncthreads();  // `space` may be used again
  }
};

// Where there are no such sums.
struct NoSums {};

// Whether a branch keeps the compiler from having several vectors under way: it has no registers left for them.
template <Kind KIND, typename Tile>
constexpr bool kOneByOne = KIND == Kind::layer && Tile::PIPELINED && Tile::N > 1;

// What a row has besides x and dy, of x's type. Of a gate it is known when it applies, or seen at run time.
enum class Extra : uint8_t { none, dsum, gate, gate_first, gate_last };

template <Extra EXTRA>
constexpr bool kIsGate = EXTRA >= Extra::gate;

// What a row's sums and dx are computed from. Beside these `get` may return what only the results want.
template <typename X, typename DY, typename Tile>
struct Operands {
  struct Rest {};
  Row<X, Tile> x;
  Row<DY, Tile> dy;

  __device__ Rest get(int slot, int64_t first, int left, float (&to_x)[Tile::N], float (&to_dy)[Tile::N]) const {
    x.get(slot, first, left, to_x);
    dy.get(slot, first, left, to_dy);
    return {};
  }
};

// This warp's part of the sums of a row, whose shares of dscale and dbias are added to those.
template <Kind KIND, typename Tile, typename T, typename Operands, typename DScale, typename DBias>
__device__ RowSums<KIND> warp_sums(const T& group, RowStatistics s, const Operands& operands,
                                   const FloatWeight<Tile>& scale, DScale& dscale, DBias& dbias) {
  if constexpr (KIND == Kind::layer) s = s.bounded();
  Sum<Tile> g_sum, gx_sum;
  for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
    if (kOneByOne<KIND, Tile> && left <= 0) return;
    float x_hat[Tile::N], g[Tile::N];
    operands.get(slot, first, left, x_hat, g);
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) {
      x_hat[i] = s.template x_hat<KIND>(x_hat[i]);
      if constexpr (!std::is_same_v<DScale, NoSums>)
        dscale.value[slot][i] = fmaf(g[i], x_hat[i], dscale.value[slot][i]);
      if constexpr (!std::is_same_v<DBias, NoSums>) dbias.value[slot][i] += g[i];
      g[i] *= scale[slot][i];
    }
    if constexpr (KIND == Kind::layer) g_sum.add(g);
    gx_sum.add_products(g, x_hat);
  });
  RowSums<KIND> sums;
  sums.value[0] = group.warp_sum(gx_sum.value());
  if constexpr (KIND == Kind::layer) sums.value[1] = group.warp_sum(g_sum.value());
  return sums;
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

  __device__ void add_to(int slot, int64_t first, int left, float (&dx)[Tile::N]) const {
    float more[Tile::N];
    row.get(slot, first, left, more);
    accumulate(dx, more);
  }
};

template <typename X, typename Tile>
struct MemoryAdded {
  const X* row;

  __device__ void add_to(int, int64_t first, int left, float (&dx)[Tile::N]) const {
    if (!row) return;
    float more[Tile::N];
    unpack(load<Tile::ALIGNED, Tile::N>(row + first, left), more);
    accumulate(dx, more);
  }
};

// Stores dx and what is added to it.
template <typename Tile, typename X, typename Added>
struct DxResult {
  const Added& added;
  X* dx;

  template <typename Rest>
  __device__ void store(const Rest&, int slot, int64_t first, int left, float (&vector)[Tile::N],
                        const float (&)[Tile::N], const float (&)[Tile::N]) const {
    added.add_to(slot, first, left, vector);
    cuda::store<Tile::ALIGNED>(dx + first, pack<X>(vector), left);
  }
};

// dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) of a row, which `result` stores. `sums`: of the whole row.
template <Kind KIND, typename Tile, typename T, typename Operands, typename Result>
__device__ void store_dx(const T& group, RowStatistics s, const RowSums<KIND>& sums, const Operands& operands,
                         const FloatWeight<Tile>& scale, const Result& result) {
  constexpr bool kLayer = KIND == Kind::layer;
  const float slope = sums.value[0] * group.reciprocal() * s.rstd;
  const float level = kLayer ? sums.value[kLayer] * group.reciprocal() * s.rstd : 0.0f;
  for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
    if (kOneByOne<KIND, Tile> && left <= 0) return;
    float x_hat[Tile::N], g[Tile::N];
    const auto rest = operands.get(slot, first, left, x_hat, g);
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) {
      x_hat[i] = s.template x_hat<KIND>(x_hat[i]);
      g[i] = fmaf(g[i] * scale[slot][i], s.rstd, -(kLayer ? fmaf(x_hat[i], slope, level) : x_hat[i] * slope));
    }
    result.store(rest, slot, first, left, g, x_hat, scale[slot]);
  });
}

}  // namespace jaxnorm::cuda
