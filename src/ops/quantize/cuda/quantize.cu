// Rows rounded to 8 bits, by the loops of the forward.
#include "engine/cuda/device.h"
#include "ops/quantize/call.h"
#include "ops/shared/cuda/load.cuh"
#include "ops/shared/cuda/quantize.cuh"

namespace jaxnorm::cuda {

// A row's scale, of its largest magnitude.
struct RowScale {
  struct Part {
    float value[1];
    static constexpr int kTicket = -1;

    __device__ static Part merge(const Part& part, const Part& first, int count, float reciprocal) {
      return Largest::merge(part, first, count, reciprocal);
    }
  };
  using TicketPart = Part;

  struct Statistics {
    float scale;
  };

  template <typename Tile, typename Row, typename Group>
  __device__ static Part warp_part(const Row& x, const Group& group, float) {
    float magnitude = 0;
    for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
      float v[Tile::N];
      x.get(vec, col, remaining, v);
      magnitude = largest_in(magnitude, v);
    });
    return {{group.warp_largest(magnitude)}};
  }

  __device__ static Statistics finish(const QuantizeForward& p, const Part& whole, float) {
    return {scale_of(p.quantized, whole.value[0])};
  }

  __device__ static void write(const QuantizeForward& p, const Statistics& s, int64_t row) {
    p.quantized.scales[row] = s.scale;
  }
};

// For both loops.
template <typename Tile>
struct StoreRounded : RowEpilogue {
  template <typename... Args>
  __device__ explicit StoreRounded(const Args&...) {}
  __device__ void arrive(const QuantizeForward&) {}

  template <typename Launch, typename Group, typename Rows>
  __device__ __forceinline__ void finish(const QuantizeForward& p, const Launch& launch, const Group& group,
                                         const Rows& rows) const {
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r)
      if (rows.is_written(r)) finish<void>(p, launch, group, rows.s[r], rows.row(r), rows.x[r]);
  }

  template <typename Load, typename Launch, typename Group, typename Row>
  __device__ __forceinline__ void finish(const QuantizeForward& p, const Launch&, const Group& group,
                                         const RowScale::Statistics& s, int64_t row, const Row& x) const {
    const float reciprocal = 1.0f / s.scale;
    uint8_t* to = static_cast<uint8_t*>(p.quantized.values.data) + row * p.cols;
    hide(to);
    with_quantized(p.quantized.values.dtype, [&](auto dtype) {
      for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
        float v[Tile::N];
        x.get(vec, col, remaining, v);
#pragma unroll
        for (float& value : v) value *= reciprocal;
        store<Tile::ALIGNED>(to + col, pack_quantized<decltype(dtype)::value>(v), remaining);
      });
    });
  }
};

template <typename X>
struct QuantizeOp : RowOp<X, RowScale> {
  using Params = QuantizeForward;
  template <typename Tile>
  using Load = LoadRow<X, Tile>;
  template <typename R, typename Tile>
  using Epilogue = StoreRounded<Tile>;
  template <typename R, typename Tile>
  using PipelinedEpilogue = StoreRounded<Tile>;
};

template <typename X>
cudaError_t run_quantize(const QuantizeForward& p, const Plan& plan, cudaStream_t stream) {
  constexpr int N = kVector<X>;
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.x, p.quantized.values);
  return with_regime<ForwardRegimes<sizeof(X)>>(plan, [&](auto regime) {
    RowsLaunch launch(plan, p.cols, N, {});
    return RowLauncher<QuantizeOp<X>, decltype(regime)>{p, plan, launch, stream}.run(is_aligned);
  });
}

Outcome run(const QuantizeForward& p, Stream stream) {
  if (p.rows == 0) return {cudaSuccess};
  const Plan plan = make_forward_plan(/*centred=*/false, p.x.dtype, p.cols, current_device().max_cluster());
  return {with_dtype(p.x.dtype, [&](auto x) { return run_quantize<decltype(x)>(p, plan, stream); })};
}

}  // namespace jaxnorm::cuda
