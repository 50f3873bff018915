// y = x_hat * (scale + scale_offset) + bias.
#pragma once

#include "cuda/engine/row_loop.cuh"
#include "cuda/engine/weight.cuh"

namespace jaxnorm::cuda {

// TERM: whether there is a bias.
template <bool TERM>
__device__ float affine(float x_hat, float factor, float term) {
  return TERM ? fmaf(x_hat, factor, term) : x_hat * factor;
}

// What the compiler knows of a call, so that nothing stands between the loads of weights: there is a scale, and a bias
// or not; both are of T; x_hat is rounded to y's type before the multiplication or not. PER_HEAD: whether a thread
// group's rows under way have weights of their own.
template <typename T, bool BIAS, bool ROUNDS, bool PER_HEAD = false>
struct Weights {
  using Element = T;
  static constexpr bool kBias = BIAS, kRounds = ROUNDS, kPerHead = PER_HEAD;
  using PerHead = Weights<T, BIAS, ROUNDS, true>;
  // Where they are held as floats, whatever type they have.
  template <typename S>
  using Floats = Weights<S, BIAS, ROUNDS>;
};

// y of a vector, in place of x. factor: scale + scale_offset; term: bias, if there is one.
template <typename Y, typename W, typename Statistics, int N>
__device__ void to_result(const Statistics& s, const float (&factor)[N], const float (&term)[N], float (&y)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = s.x_hat(y[i]);
  if constexpr (W::kRounds) unpack(pack<Y>(y), y);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = affine<W::kBias>(y[i], factor[i], term[i]);
}

// The same of N columns whose types are seen at run time. x: the row in memory; weights_at: where the weights' row
// begins; round: what is done with x_hat before the multiplication.
template <int N, typename P, typename Statistics, typename X, typename F>
__device__ void any_result(const P& p, const Statistics& s, const X* x, int64_t weights_at, int64_t col, F round,
                           float (&y)[N]) {
  float factor[N], term[N];
  unpack(load<true, N>(x + col, N), y);
  if (p.scale.data) load_floats<true>(p.scale, weights_at + col, N, factor);
  if (p.bias.data) load_floats<true>(p.bias, weights_at + col, N, term);
  complete(p.scale.data, p.scale_offset, 1.0f, factor);
  complete(p.bias.data, kNothing, kNothing, term);
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = affine<true>(round(s.x_hat(y[i])), factor[i], term[i]);
}

// The zeros after a row of y.
template <int N, typename P, typename Group>
__device__ void pad_row(const P& p, const RowsLaunch& launch, const Output& y, const Group& group, int64_t row) {
  if (launch.own.y_pad == 0 || group.begin > 0) return;
  const float zeros[N] = {};
  const int64_t end = (row + 1) * (p.cols + launch.own.y_pad);
#pragma unroll 1
  for (int64_t at = end - launch.own.y_pad + group.rank * N; at < end; at += group.threads * N)
    store_floats(y, at, zeros);
}

// Where the weights of such rows are until their statistics are known. A thread holds scale and bias of one row, or of
// each row that it has under way if those have weights of their own.
template <typename S, typename R, typename Tile, typename W, int ROWS, bool CENTRED>
struct HeldWeights {
  using T = typename W::Element;
  static constexpr int kCount = W::kPerHead ? ROWS : 1, kKinds = W::kBias ? 2 : 1;
  // Of a thread, with its rows and its weights.
  static constexpr int kRegisters =
      Tile::VECTORS * Tile::N * static_cast<int>(ROWS * sizeof(S) + kCount * kKinds * sizeof(T)) / 4;
  static constexpr bool kSameType = sizeof(T) == sizeof(S), kLarger = sizeof(T) > sizeof(S), kVectors = Tile::N > 1;
  // There is no room in registers for those of LayerNorm, nor for f32 beside a half type. Where a thread has more of
  // them than here, the way through shared memory takes longer than loading them late.
  static constexpr bool kShared = kVectors && !W::kPerHead &&
                                  (kSameType ? CENTRED && R::kThreads == kWholeBlock && R::kVectors == 4
                                             : kLarger && R::kThreads == 8 && R::kVectors <= 2);
  static constexpr Place kPlace = kShared                                     ? Place::shared
                                  : kVectors && kSameType && kRegisters <= 32 ? Place::registers
                                                                              : Place::memory;
  using Weight = PackedWeight<T, Tile, kPlace>;
  static constexpr int kSharedBytes = Weight::kSharedBytes * kKinds;  // of a thread
};

// The epilogue of direct rows with known weights.
template <typename Op, typename R, typename Tile>
class AffineEpilogue : public RowEpilogue {
  using W = typename Op::Known;
  using Y = typename Op::Y;
  static constexpr int kRows = Op::template kRows<R>;
  using Held = HeldWeights<typename Op::Stream, R, Tile, W, kRows, Op::Stats::kCentred>;
  using Weight = typename Held::Weight;

 public:
  static constexpr int kSharedBytes = Held::kSharedBytes;

  template <typename P, typename Group, typename Rows>
  __device__ __forceinline__ AffineEpilogue(const P& p, const RowsLaunch& launch, const Group& group,
                                            const Rows& rows) {
#pragma unroll
    for (int r = 0; r < Held::kCount; ++r) {
      const auto weight = [&](const Input& whole, int kind) {
        char* const space = dynamic_shared() + kind * Weight::kSharedBytes * static_cast<int>(blockDim.x);
        if constexpr (!W::kPerHead) return Weight(group, whole, true, space);
        return Weight(group, from(whole, launch.weight_rows.of_row(rows.row_to_read(r)) * p.cols));
      };
      scale_[r] = weight(p.scale, 0);
      if constexpr (W::kBias) bias_[r] = weight(p.bias, 1);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      y_[r] = static_cast<Y*>(p.y.data) + rows.row(r) * (Op::kPads ? p.cols + launch.own.y_pad : p.cols);
      // Hides that this row lies as far from its array's beginning as the one that was read: the compiler would keep
      // that distance for every vector.
      hide(y_[r]);
      if constexpr (Tile::UNALIGNED) writer_[r] = {group, y_[r]};
    }
  }

  template <typename P, typename Group, typename Rows>
  __device__ __forceinline__ void finish(const P& p, const RowsLaunch& launch, const Group& group, Rows& rows) {
    if constexpr (Held::kPlace == Place::shared) wait_for_copies();
    for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
      float factor[Tile::N], term[Tile::N];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r < Held::kCount) {
          scale_[r].get(vec, col, remaining, factor);
          if constexpr (W::kBias) bias_[r].get(vec, col, remaining, term);
          complete(true, p.scale_offset, 1.0f, factor);
        }
        float values[Tile::N];
        rows.x[r].get(vec, col, remaining, values);
        to_result<Y, W>(rows.s[r], factor, term, values);
        if constexpr (Tile::UNALIGNED) {
          writer_[r].write(vec, col, remaining, pack<Y>(values), rows.is_written(r));
        } else if (rows.is_written(r)) {
          store<Tile::ALIGNED>(y_[r] + col, pack<Y>(values), remaining);
        }
      }
    });
    if constexpr (Op::kPads)
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (rows.is_there(r)) pad_row<Tile::N>(p, launch, {p.y.data, kDtype<Y>}, group, rows.row(r));
  }

 private:
  Weight scale_[Held::kCount], bias_[Held::kCount];
  Y* y_[kRows];
  UnalignedWriter<Y, Tile> writer_[kRows];
};

// And of pipelined rows: weights as floats in registers for all rows of a cluster.
template <typename Op, typename R, typename Tile>
class PipelinedAffine : public RowEpilogue {
  using Y = typename Op::Y;

 public:
  template <typename P, typename Group>
  __device__ __forceinline__ PipelinedAffine(const P& p, const Group& group, char*)
      : scale_(group, p.scale), bias_(group, p.bias) {}

  template <typename P>
  __device__ __forceinline__ void arrive(const P& p) {
    scale_.arrive(p.scale_offset, 1.0f);
    bias_.arrive(0.0f, kNothing);
  }

  template <typename Load, typename P, typename Group, typename Statistics>
  __device__ __forceinline__ void finish(const P& p, const RowsLaunch& launch, const Group& group, const Statistics& s,
                                         int64_t row, const typename Load::Fragment& x) const {
    Y* const y = static_cast<Y*>(p.y.data) + row * (p.cols + launch.own.y_pad);
    for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
      float values[Tile::N];
      x.get(vec, col, remaining, values);
      Load::pass_on(p, row, col, values, remaining);
      to_result<Y, typename Op::Known>(s, scale_[vec], bias_[vec], values);
      store<true>(y + col, pack<Y>(values), remaining);
    });
    pad_row<Tile::N>(p, launch, {p.y.data, kDtype<Y>}, group, row);
  }

 private:
  FloatWeight<Tile> scale_, bias_;
};

// The epilogue of any other rows: vector by vector in a loop, or there would be as many kernels as types, or large
// ones.
template <typename Op, typename R, typename Tile>
struct AnyEpilogue : RowEpilogue {
  template <typename P, typename Group, typename Rows>
  __device__ AnyEpilogue(const P&, const RowsLaunch&, const Group&, const Rows&) {}

  template <typename P, typename Group, typename Rows>
  __device__ __forceinline__ void finish(const P& p, const RowsLaunch& launch, const Group& group, Rows& rows) {
    for (int r = 0; r < Rows::kRows && rows.is_there(r); ++r)
      finish_row(p, launch, group, rows.s[r], rows.row(r), rows.x[r].data());
  }

 private:
  template <typename P, typename Group, typename Statistics, typename X>
  __device__ static void finish_row(const P& p, const RowsLaunch& launch, const Group& group, const Statistics& s,
                                    int64_t row, const X* x) {
    constexpr int N = Tile::ALIGNED ? Tile::N : 1;
    const auto round = [&](float x_hat) { return p.multiply_before_cast ? x_hat : round_to(p.y.dtype, x_hat); };
    const int64_t step = int64_t{group.threads} * N, weights_at = launch.weight_rows.of_row(row) * p.cols;
    for (int64_t col = group.begin + group.rank * N; col < group.end; col += step) {
      float y[N];
      any_result(p, s, x, weights_at, col, round, y);
      store_floats(p.y, row * (p.cols + launch.own.y_pad) + col, y);
    }
    pad_row<N>(p, launch, p.y, group, row);
  }
};

}  // namespace jaxnorm::cuda
