// Gated RMSNorm with a quantised result. Rows have the plan of the one without, so that the y that is quantised has the
// same bits.
#include "engine/cuda/device.h"
#include "ops/norm/cuda/gated_norm.cuh"
#include "ops/norm/cuda/quantized_epilogue.cuh"

namespace jaxnorm::cuda {

// With weights of X or f32.
template <typename Op, typename Tile>
struct QuantizeGated : RowEpilogue {
  using X = typename Op::Stream;
  using P = GatedNormQuantizedForward;

  template <typename Group, typename Rows>
  __device__ QuantizeGated(const P&, const RowsLaunch&, const Group&, const Rows&) {}

  template <typename Group, typename Rows>
  __device__ __forceinline__ void finish(const P& p, const RowsLaunch& launch, Group& group, Rows& rows) {
    constexpr int kRows = Rows::kRows;
    Floats<Tile> floats[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t weights_at = launch.weight_rows.of_row(rows.row_to_read(r)) * p.cols;
      for_each_result<X, Tile>(p, group, rows.s[r], rows.x[r], from(p.scale, weights_at),
                               [&](int vec, auto, int, const float (&values)[Tile::N]) {
#pragma unroll
                                 for (int i = 0; i < Tile::N; ++i) floats[r].v[vec][i] = values[i];
                               });
      if (p.quantized.smooth.data) multiply(group, from(p.quantized.smooth, weights_at), floats[r]);
    }
    Values<Tile, kRows, Op::kExtras> values{floats};
    const auto row = [&](int r) { return rows.row(r); };
    values.publish(p, group);
    values.rescale(p, group, row);
    values.store(p, group, row);
  }

 private:
  // By vectors that are loaded several at once, as scale's.
  template <typename Group>
  __device__ static void multiply(const Group& group, const Input& smooth, Floats<Tile>& row) {
    constexpr int kBatch = Tile::VECTORS == 1 ? 1 : 2;
    for_each_batch<Tile, kBatch>(group, [&](auto visit) {
      float factor[kBatch][Tile::N];
      with_weight_type<X>(smooth.dtype, [&](auto* type) {
        const auto* const data = static_cast<const std::remove_pointer_t<decltype(type)>*>(smooth.data);
        visit([&](int i, int, auto col, int remaining) {
          unpack(load<Tile::ALIGNED, Tile::N>(data + col, remaining), factor[i]);
        });
      });
      visit([&](int i, int vec, auto, int) {
#pragma unroll
        for (int e = 0; e < Tile::N; ++e) row.v[vec][e] *= factor[i][e];
      });
    });
  }
};

// EXTRAS: see `Values`.
template <typename X, bool FIRST, bool EXTRAS = false>
struct GatedQuantizedOp : RowOp<X, MeanSquare, 2> {
  using Params = GatedNormQuantizedForward;
  static constexpr bool kExtras = EXTRAS;
  template <typename Tile>
  using Load = LoadGated<X, Tile, FIRST>;
  template <typename R, typename Tile>
  using Epilogue = QuantizeGated<GatedQuantizedOp, Tile>;
};

// v of N columns, for AnyQuantize: of any rows, where those of weights are found by x's.
template <int N, typename Statistics, typename X>
__device__ __noinline__ Packed<float, N> any_values(const GatedNormQuantizedForward& p, Statistics s, const X* x,
                                                    int64_t col) {
  const int64_t at = x - static_cast<const X*>(p.x.data) + col, weights_at = at % (p.weight_rows.count * p.cols);
  float v[N], smooth[N];
  any_gated_result<X>(p, s, at, weights_at, v);
  if (p.quantized.smooth.data) load_floats<true>(p.quantized.smooth, weights_at, N, smooth);
  complete(p.quantized.smooth.data, kNothing, 1.0f, smooth);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] *= smooth[i];
  return pack<float>(v);
}

// Everything else: rows that vectors do not divide, arrays that are not aligned, weights of another half type.
template <typename X, bool FIRST>
struct AnyGatedQuantizedOp : GatedQuantizedOp<X, FIRST> {
  template <typename R, Access ACCESS>
  static constexpr int kRegisters = 0;
  template <typename R, typename Tile>
  using Epilogue = AnyQuantize<AnyGatedQuantizedOp, Tile>;
};

template <typename X, bool FIRST>
cudaError_t gated_norm_quantized_as(const GatedNormQuantizedForward& p, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const Plan plan = make_gated_forward_plan(kDtype<X>, p.cols, FIRST);
  const auto is_x_or_f32 = [](const Input& weight) {
    return !weight || weight.dtype == kDtype<X> || weight.dtype == Dtype::f32;
  };
  const bool is_known = is_x_or_f32(p.scale) && is_x_or_f32(p.quantized.smooth);
  const bool is_aligned = read_is_aligned<N>(p) && are_aligned<N>(p.quantized.smooth, p.quantized.values);
  return with_regime<GatedForwardRegimes<sizeof(X), FIRST>>(plan, [&](auto regime) {
    using R = decltype(regime);
    using Own = typename Reread<R>::Regime;
    using Any = Regime<Own::kThreads, Own::kVectors, Own::kCluster>;  // of however many threads
    RowsLaunch launch(plan, p.cols, N, p.weight_rows);
    if (!is_known || !is_aligned)
      return RowLauncher<AnyGatedQuantizedOp<X, FIRST>, Any>{p, plan, launch, stream}
          .template direct<Access::elementwise>();
    const auto run = [&](auto op) {
      return RowLauncher<decltype(op), R>{p, plan, launch, stream}.template direct<Access::vectors>();
    };
    return p.quantized.group == kGroups[0] ? run(GatedQuantizedOp<X, FIRST, true>{})
                                           : run(GatedQuantizedOp<X, FIRST>{});
  });
}

Outcome run(const GatedNormQuantizedForward& p, Stream stream) {
  if (p.cols > kGatedCols) return {cudaErrorNotSupported};
  if (p.rows == 0) return {cudaSuccess};
  return {with_dtype(p.x.dtype, [&](auto type) {
    return with_order(p, [&](auto first) { return gated_norm_quantized_as<decltype(type), first.value>(p, stream); });
  })};
}

}  // namespace jaxnorm::cuda
