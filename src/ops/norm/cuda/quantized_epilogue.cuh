// The epilogues of rows whose result is quantised.
#pragma once

#include "ops/norm/cuda/quantized_row.cuh"
#include "ops/shared/cuda/load.cuh"

namespace jaxnorm::cuda {

// HOLDS_SCALE: whether there are registers for it beside the rows.
template <typename Op, typename Tile, bool HOLDS_SCALE>
class QuantizeEpilogue : public RowEpilogue {
  using X = typename Op::Stream;
  using P = QuantizedNormForward;

 public:
  template <typename Launch, typename Group, typename Rows>
  __device__ __forceinline__ QuantizeEpilogue(const P& p, const Launch&, const Group& group, const Rows&)
      : scale_(group, p) {}

  template <typename Launch, typename Group, typename Rows>
  __device__ __forceinline__ void finish(const P& p, const Launch&, Group& group, Rows& rows) {
    for_each_vector<Tile>(group, [&](int vec, auto, int) {
#pragma unroll
      for (int r = 0; r < Rows::kRows; ++r)
#pragma unroll
        for (float& v : rows.x[r].v[vec]) v = rows.s[r].x_hat(v);
    });
    Values<Tile, Rows::kRows, Op::kExtras> values{rows.x};
    const auto row = [&](int r) { return rows.row(r); };
    const EitherWeight<X, Tile, Place::memory, Place::memory> bias(group, p.bias);
    values.template apply_weights<X, Op::Stats::kCentred>(p, group, scale_, bias);
    if constexpr (Op::kExtras) values.template store_y<X>(p, group, row);
    values.template apply_smooth<X>(p, group);
    values.publish(p, group);
    values.rescale(p, group, row);
    values.store(p, group, row);
  }

 private:
  const PackedScale<X, Tile, HOLDS_SCALE> scale_;
};

// Of pipelined rows. While the blocks of a cluster exchange the largest magnitude of one row, the statistics of the
// next are under way, and the other way round. LayerNorm's bias is in shared memory: loaded late, each row would wait
// for it.
template <typename Op, typename Tile, bool HOLDS_SCALE>
class PipelinedQuantize : public RowEpilogue {
  using X = typename Op::Stream;
  using P = QuantizedNormForward;
  static constexpr bool kCentred = Op::Stats::kCentred;
  static constexpr Place kBiasPlace = kCentred ? Place::shared : Place::memory;

 public:
  static constexpr bool kReduces = true;

  template <typename Group>
  __device__ __forceinline__ PipelinedQuantize(const P& p, const Group& group, char* shared)
      : scale_(group, p), bias_(group, p.bias, shared) {}

  __device__ __forceinline__ void arrive(const P& p) {
    scale_.arrive(p);
    if constexpr (kCentred) wait_for_copies();
  }

  template <typename Load, typename Group, typename Statistics>
  __device__ __forceinline__ void begin(const P& p, const Group& group, const Statistics& s, int64_t row,
                                        const typename Load::Fragment& x) {
    for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
      float (&v)[Tile::N] = row_[0].v[vec];
      x.get(vec, col, remaining, v);
      Load::pass_on(p, row, col, v, remaining);
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) v[i] = s.x_hat(v[i]);
    });
  }

  template <typename Group>
  __device__ __forceinline__ void publish(const P& p, Group& group) {
    Values<Tile, 1, Op::kExtras> values{row_};
    values.template apply_weights<X, kCentred>(p, group, scale_, bias_);
    values.template apply_smooth<X>(p, group);
    values.publish(p, group);
  }

  template <typename Group>
  __device__ __forceinline__ void finish(const P& p, Group& group, int64_t row) {
    const auto number = [&](int) { return row; };
    Values<Tile, 1, Op::kExtras> values{row_};
    values.rescale(p, group, number);
    values.store(p, group, number);
  }

  static int shared_bytes(const Input& bias) {
    return bias && kCentred ? Tile::VECTORS * Tile::N * size_of(bias.dtype) : 0;
  }

 private:
  std::conditional_t<HOLDS_SCALE, FloatScale<X, Tile>, PackedScale<X, Tile, false>> scale_;
  const EitherWeight<X, Tile, kBiasPlace, kBiasPlace> bias_;
  Floats<Tile> row_[1];
};

// v of N columns of any types. This and the next are functions of their own: kernels that are not fast anyway share
// them, and take less time to compile.
template <int N, typename Statistics, typename X>
__device__ __noinline__ Packed<float, N> any_values(const QuantizedNormForward& p, Statistics s, const X* x,
                                                    int64_t col) {
  float v[N], factor[N];
  any_result(p, s, x, 0, col, [](float x_hat) { return x_hat; }, v);
  if (p.quantized.smooth.data) {
    load_floats<true>(p.quantized.smooth, col, N, factor);
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
template <typename Op, typename Tile>
class AnyQuantize : public RowEpilogue {
  using P = typename Op::Params;
  static constexpr int N = Tile::ALIGNED ? Tile::N : 1;

 public:
  template <typename Launch, typename Group, typename Rows>
  __device__ AnyQuantize(const P&, const Launch&, const Group&, const Rows&) {}

  template <typename Launch, typename Group, typename Rows>
  __device__ void finish(const P& p, const Launch&, Group& group, Rows& rows) const {
    static_assert(Rows::kRows == 1);
    if (p.quantized.given || is_by_row(p)) {
      whole_row(p, group, rows.row(0), rows.s[0], rows.x[0].data());
    } else {
      groups(p, group, rows.row(0), rows.s[0], rows.x[0].data());
    }
  }

 private:
  template <int M>
  __device__ static float largest(float magnitude, const Packed<float, M>& values) {
    float v[M];
    unpack(values, v);
    return largest_in(magnitude, v);
  }

  template <typename Group, typename Statistics, typename X>
  __device__ static void whole_row(const P& p, Group& group, int64_t row, Statistics s, const X* x) {
    const int64_t step = int64_t{group.threads} * N;
    float scale;
    if (p.quantized.given) {
      scale = __ldg(p.quantized.given);
    } else {
      float magnitude = 0;
#pragma unroll 1
      for (int64_t col = group.begin + group.rank * N; col < group.end; col += step)
        magnitude = largest(magnitude, any_values<N>(p, s, x, col));
      group.template publish<Largest>({{group.warp_largest(magnitude)}});
      scale = scale_of(p.quantized, group.template collect<Largest>().value[0]);
      if (group.rank + group.begin == 0) write_scale<true>(p, row, 0, scale);
    }
    const float reciprocal = 1.0f / scale;
#pragma unroll 1
    for (int64_t col = group.begin + group.rank * N; col < group.end; col += step)
      store_any<N>(p.quantized.values, row * p.cols + col, any_values<N>(p, s, x, col), reciprocal);
  }

  // A warp's threads of the thread group share a group. They need not have its columns otherwise.
  template <typename Group, typename Statistics, typename X>
  __device__ static void groups(const P& p, Group& group, int64_t row, Statistics s, const X* x) {
    int64_t warp = group.rank / Tile::LANES, warps = group.threads / Tile::LANES;
    if constexpr (Group::kSpansBlocks) {
      warp += warps * Cluster::rank();
      warps *= Cluster::blocks();
    }
    const int64_t group_cols = p.quantized.group;
#pragma unroll 1
    for (int64_t begin = warp * group_cols; begin < p.cols; begin += warps * group_cols) {
      const int64_t first = begin + group.rank % Tile::LANES, end = begin + group_cols;
      float magnitude = 0;
#pragma unroll 1
      for (int64_t col = first; col < end; col += Tile::LANES)
        magnitude = largest(magnitude, any_values<1>(p, s, x, col));
      const float scale = scale_of(p.quantized, group.warp_largest(magnitude)), reciprocal = 1.0f / scale;
      if (group.rank % Tile::LANES == 0) write_scale<true>(p, row, group_of<true>(p.quantized, begin), scale);
#pragma unroll 1
      for (int64_t col = first; col < end; col += Tile::LANES)
        store_any<1>(p.quantized.values, row * p.cols + col, any_values<1>(p, s, x, col), reciprocal);
    }
  }
};

}  // namespace jaxnorm::cuda
