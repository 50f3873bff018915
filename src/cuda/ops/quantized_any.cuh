// The epilogue of any other rows whose result is quantised: no alignment, any weights, any length.
#pragma once

#include "cuda/ops/quantized_row.cuh"

namespace jaxnorm::cuda {

// v of N columns of any types. This and the next are functions of their own: kernels that are not fast anyway share
// them, and take less time to compile.
template <Kind KIND, int N, typename X>
__device__ __noinline__ Packed<float, N> any_values(const Forward& p, Statistics s, const X* x, int64_t first) {
  float v[N], factor[N];
  finish_generic<KIND>(p, s, x, 0, first, v);
  if (p.quantized.smooth.data) {
    load_floats<true>(p.quantized.smooth, first, N, factor);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= factor[i];
  }
  return pack<float>(v);
}

template <int N>
__device__ __noinline__ void store_any(const Output& to, int64_t at, Packed<float, N> values, float reciprocal) {
  float v[N];
  unpack(values, v);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] *= reciprocal;
  with_quantized(to.dtype, [&](auto dtype) {
    store<true>(static_cast<uint8_t*>(to.data) + at, pack_quantized<decltype(dtype)::value>(v), N);
  });
}

// Of any rows, which it reads once for each pass, and with any weights. In loops, to be little code.
template <Kind KIND, typename Tile>
struct QuantizeGeneric {
  static constexpr int N = Tile::ALIGNED ? Tile::N : 1;
  const Forward& p;

  template <typename ThreadGroup, typename Rows, typename F>
  __device__ void operator()(ThreadGroup& group, const Rows& rows, F collect) const {
    static_assert(Rows::kRows == 1);
    collect();
    if (p.quantized.given || is_by_row(p)) {
      whole_row(group, rows.row(0), rows.s[0], rows.memory[0]);
    } else {
      groups(group, rows.row(0), rows.s[0], rows.memory[0]);
    }
  }

 private:
  template <int M>
  __device__ static float largest(float magnitude, const Packed<float, M>& values) {
    float v[M];
    unpack(values, v);
    return largest_in(magnitude, v);
  }

  template <typename ThreadGroup, typename X>
  __device__ void whole_row(ThreadGroup& group, int64_t row, Statistics s, const X* x) const {
    const int64_t step = int64_t{group.threads} * N;
    float scale;
    if (p.quantized.given) {
      scale = __ldg(p.quantized.given);
    } else {
      float magnitude = 0;
#pragma unroll 1
      for (int64_t first = group.begin + group.rank * N; first < group.end; first += step)
        magnitude = largest(magnitude, any_values<KIND, N>(p, s, x, first));
      group.template publish<Largest>({{group.warp_largest(magnitude)}});
      scale = scale_of(p.quantized, group.template collect<Largest>().value[0]);
      if (group.rank + group.begin == 0) write_scale(p, row, 0, scale);
    }
    const float reciprocal = 1.0f / scale;
#pragma unroll 1
    for (int64_t first = group.begin + group.rank * N; first < group.end; first += step)
      store_any<N>(p.quantized.values, row * p.cols + first, any_values<KIND, N>(p, s, x, first), reciprocal);
  }

  // A warp's threads of the thread group share a group. They need not have its columns otherwise.
  template <typename ThreadGroup, typename X>
  __device__ void groups(ThreadGroup& group, int64_t row, Statistics s, const X* x) const {
    int64_t warp = group.rank / Tile::LANES, warps = group.threads / Tile::LANES;
    if constexpr (ThreadGroup::kSpansBlocks) {
      warp += warps * Cluster::rank();
      warps *= Cluster::blocks();
    }
    const int64_t group_cols = p.quantized.group;
#pragma unroll 1
    for (int64_t begin = warp * group_cols; begin < p.cols; begin += warps * group_cols) {
      const int64_t first = begin + group.rank % Tile::LANES, end = begin + group_cols;
      float magnitude = 0;
#pragma unroll 1
      for (int64_t column = first; column < end; column += Tile::LANES)
        magnitude = largest(magnitude, any_values<KIND, 1>(p, s, x, column));
      const float scale = scale_of(p.quantized, group.warp_largest(magnitude)), reciprocal = 1.0f / scale;
      if (group.rank % Tile::LANES == 0) write_scale(p, row, group_of(p.quantized, begin), scale);
#pragma unroll 1
      for (int64_t column = first; column < end; column += Tile::LANES)
        store_any<1>(p.quantized.values, row * p.cols + column, any_values<KIND, 1>(p, s, x, column), reciprocal);
    }
  }
};

}  // namespace jaxnorm::cuda
