// y of a device's shard of rows, from the statistics of whole rows: tiles of rows, a thread with its columns' weights
// in registers.
#include "engine/cuda/tile_loop.cuh"
#include "engine/cuda/weight.cuh"
#include "ops/norm/cuda.h"
#include "ops/norm/cuda/affine.cuh"

namespace jaxnorm::cuda {
namespace {

// From column `col` on.
template <bool ALIGNED, int N>
__device__ void load_weight(const Input& weight, int64_t col, int remaining, float offset, float absent,
                            float (&to)[N]) {
  if (weight.data) load_floats<ALIGNED>(weight, col, remaining, to);
  complete(weight.data, offset, absent, to);
}

// Of x, whose statistics were taken from the last row on, the first rows are what the cache still has: tiles go from
// the first on.
template <typename X_, typename Y_, bool IS_ALIGNED>
class ApplyOp {
 public:
  using Params = ShardApply;
  using X = X_;
  using Y = Y_;
  static constexpr bool ALIGNED = IS_ALIGNED;
  static constexpr int N = kUnit<X, Y>;
  struct Row {
    float mean, rstd;
  };

  __device__ static const Input& from(const ShardApply& p) { return p.x; }
  __device__ static const Output& to(const ShardApply& p) { return p.y; }

  __device__ ApplyOp(const ShardApply& p, int64_t col, int remaining) {
    load_weight<ALIGNED>(p.scale, col, remaining, p.scale_offset, 1.0f, factor_);
    load_weight<ALIGNED>(p.bias, col, remaining, 0.0f, -0.0f, term_);
  }

  __device__ Row fetch(const ShardApply& p, int64_t row) const { return {p.mean ? p.mean[row] : 0.0f, p.rstd[row]}; }

  __device__ void apply(const ShardApply& p, const Row& row, float (&values)[N]) const {
#pragma unroll
    for (float& value : values) value = (value - row.mean) * row.rstd;
    if (!p.multiply_before_cast) unpack(pack<Y>(values), values);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = affine<true>(values[i], factor_[i], term_[i]);
  }

 private:
  float factor_[N], term_[N];
};

template <typename X, typename Y>
cudaError_t launch(const ShardApply& p, cudaStream_t stream) {
  constexpr int N = kUnit<X, Y>;
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.x, p.y, p.scale, p.bias);
  return is_aligned ? launch_tiles<ApplyOp<X, Y, true>>(p, stream) : launch_tiles<ApplyOp<X, Y, false>>(p, stream);
}

template <typename T>
cudaError_t launch_with(const ShardApply& p, cudaStream_t stream) {
  if (p.x.dtype == p.y.dtype) return launch<T, T>(p, stream);
  return p.x.dtype == Dtype::f32 ? launch<float, T>(p, stream) : launch<T, float>(p, stream);
}

}  // namespace

cudaError_t run(const ShardApply& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  const Dtype narrow = p.x.dtype == Dtype::f32 ? p.y.dtype : p.x.dtype;
  if (narrow == Dtype::f32) return launch<float, float>(p, stream);
  return narrow == Dtype::f16 ? launch_with<__half>(p, stream) : launch_with<__nv_bfloat16>(p, stream);
}

}  // namespace jaxnorm::cuda
