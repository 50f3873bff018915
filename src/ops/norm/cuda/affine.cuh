// y = x_hat * (scale + scale_offset) + bias.
#pragma once

#include "engine/cuda/row_loop.cuh"
#include "engine/cuda/weight.cuh"

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
  static constexpr bool kVaries = false;
};

// The same of norms of which one kernel serves both choices: LayerNorm has a bias or not, RMSNorm rounds x_hat or not.
template <typename T, bool CENTRED, bool PER_HEAD = false>
struct VaryingWeights : Weights<T, CENTRED, false, PER_HEAD> {
  using PerHead = VaryingWeights<T, CENTRED, true>;
  // Where they are held as floats, whatever type they have.
  template <typename S>
  using Floats = VaryingWeights<S, CENTRED>;
  static constexpr bool kVaries = true;
};

// Calls f with the weights of a call, which may be one of several. Once for all vectors: a branch for each would have
// their loads wait for each other. Y: of the result.
template <typename Y, typename W, typename P, typename F>
__device__ __forceinline__ void with_choice(const P& p, F f) {
  using T = typename W::Element;
  if constexpr (W::kVaries && W::kBias) {
    if (!p.bias.data) return f(Weights<T, false, false>{});
  } else if constexpr (W::kVaries && sizeof(Y) < 4) {
    if (!p.multiply_before_cast) return f(Weights<T, false, true>{});
  }
  f(Weights<T, W::kBias, W::kRounds>{});
}

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
        const bool is_there = !W::kVaries || whole.data;
        if constexpr (!W::kPerHead) return Weight(group, whole, is_there, space);
        return Weight(group, from(whole, launch.weight_rows.of_row(rows.row_to_read(r)) * p.cols), is_there);
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
    with_choice<Y, W>(p, [&](auto choice) { finish_as<decltype(choice)>(p, group, rows); });
    if constexpr (Op::kPads)
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (rows.is_there(r)) pad_row<Tile::N>(p, launch, {p.y.data, kDtype<Y>}, group, rows.row(r));
  }

 private:
  // CHOICE: of the weights that may be.
  template <typename CHOICE, typename P, typename Group, typename Rows>
  __device__ __forceinline__ void finish_as(const P& p, const Group& group, Rows& rows) {
    for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
      float factor[Tile::N], term[Tile::N];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r < Held::kCount) {
          scale_[r].get(vec, col, remaining, factor);
          if constexpr (CHOICE::kBias) bias_[r].get(vec, col, remaining, term);
          complete(true, p.scale_offset, 1.0f, factor);
        }
        float values[Tile::N];
        rows.x[r].get(vec, col, remaining, values);
        to_result<Y, CHOICE>(rows.s[r], factor, term, values);
        if constexpr (Tile::UNALIGNED) {
          writer_[r].write(vec, col, remaining, pack<Y>(values), rows.is_written(r));
        } else if (rows.is_written(r)) {
          store<Tile::ALIGNED>(y_[r] + col, pack<Y>(values), remaining);
        }
      }
    });
  }

  Weight scale_[Held::kCount], bias_[Held::kCount];
  Y* y_[kRows];
  UnalignedWriter<Y, Tile> writer_[kRows];
};

// And of pipelined rows: weights as floats in registers for all rows of a cluster.
template <typename Op, typename R, typename Tile>
class PipelinedAffine : public RowEpilogue {
  using Y = typename Op::Y;
  // A bias that is absent is nothing, so that there is no choice.
  using Known = typename Op::Known;
  using W = std::conditional_t<Known::kBias, Weights<float, true, false>, Known>;

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
    with_choice<Y, W>(p, [&](auto choice) {
      for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
        float values[Tile::N];
        x.get(vec, col, remaining, values);
        Load::pass_on(p, row, col, values, remaining);
        to_result<Y, decltype(choice)>(s, scale_[vec], bias_[vec], values);
        store<true>(y + col, pack<Y>(values), remaining);
      });
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
