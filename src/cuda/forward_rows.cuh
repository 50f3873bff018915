// The forward of a team's rows: their statistics, and the epilogue from registers, shared memory or, of calls that are
// not known to the compiler, from memory again.
#pragma once

#include "cuda/gated_row.cuh"
#include "cuda/launch.cuh"
#include "cuda/weight.cuh"

namespace jaxnorm::cuda {

template <typename X, typename W, typename C>
using RowOf = std::conditional_t<C::kGates, GatedRow<X, W, C::kFirst>,
                                 std::conditional_t<C::kAdds, SumRow<typename C::template Result<X>, X, W>, Row<X, W>>>;

// What holds the weights of a call that is known: scale and, if there is one, bias. kCount of each, which is one for
// each row that a team has under way if these are of several heads.
template <Kind KIND, typename X, typename R, typename W, typename C>
struct Weights {
  using T = typename C::Weight;
  static constexpr int kRows = kRowsAtOnce<R, C>, kCount = C::kHeads ? kRows : 1, kKinds = C::kBias ? 2 : 1;
  // Of a thread, with its rows and its weights.
  static constexpr int kRegisters =
      W::VECTORS * W::N * static_cast<int>(kRows * sizeof(X) + kCount * kKinds * sizeof(T)) / 4;
  static constexpr bool kSameType = sizeof(T) == sizeof(X), kLarger = sizeof(T) > sizeof(X), kVectors = W::N > 1;
  // There is no room in registers for those of layer norm, nor for f32 beside a half type. Where a thread has more of
  // them than here, the way through shared memory takes longer than loading them late.
  static constexpr bool kShared = kVectors && !C::kHeads &&
                                  (kSameType ? KIND == Kind::layer && R::kThreads == kWholeBlock && R::kVectors == 4
                                             : kLarger && R::kThreads == 8 && R::kVectors <= 2);
  static constexpr Place kPlace = kShared                                     ? Place::shared
                                  : kVectors && kSameType && kRegisters <= 32 ? Place::registers
                                                                              : Place::memory;
  using Weight = PackedWeight<T, W, kPlace>;
  static constexpr int kSharedBytes = Weight::kSharedBytes * kKinds;  // of a thread
};

// Teams whose rows do not come by way of a ring. A team has several rows under way at once if they are short.
template <Kind KIND, typename X, typename R, Access ACCESS, typename C>
__device__ __forceinline__ void forward_rows(const Forward& p, const RowsLaunch& launch) {
  using W = std::conditional_t<C::kKnown || ACCESS == Access::vectors, Walk<X, R, ACCESS>, WalkAgain<X, R, ACCESS>>;
  using Y = typename C::template Result<X>;
  using Threads = Team<R::kThreads, Part<KIND>, R::kCluster>;
  Threads team(launch.threads_per_row, p.cols, launch.span, launch.reciprocal_cols);
  const int64_t group = R::kThreads == kWholeBlock ? 1 : launch.rows_per_block;
  constexpr int kRows = W::KEPT ? kRowsAtOnce<R, C> : 1;

  // A grid holds a team for every row. Yet a loop keeps the compiler from having more under way than it has registers
  // for, where rows go by elements or have many vectors and a gate or a residual.
  constexpr bool kLoop = W::N == 1 || ((C::kGates || C::kAdds) && W::VECTORS == 8);
  int64_t first_row = team.index * kRows * group + team.place;
  if (first_row >= p.rows) return;
  do {
    RowOf<X, W, C> x[kRows];
    Statistics s[kRows];
    const Y* x_row[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // Past the last row, the first one again.
      const int64_t row = first_row + r * group, start = (row < p.rows ? row : first_row) * p.cols;
      x_row[r] = static_cast<const Y*>(p.x.data) + start;
      // Or each vector's address would be computed from the array's beginning. RMS norm by elements has no registers
      // for the row's.
      if constexpr (W::N > 1 || KIND == Kind::layer) hide(x_row[r]);
      if constexpr (C::kAdds) {
        x[r].read(team, x_row[r], static_cast<const X*>(p.residual.data) + start, static_cast<X*>(p.sum.data) + start,
                  row < p.rows);
      } else if constexpr (C::kGates) {
        x[r].read(team, x_row[r], static_cast<const X*>(p.gate.data.data) + start, p.gate.activation);
      } else {
        x[r].read(team, x_row[r]);
      }
    }
    const auto collect = [&] {
      const float cols = warp_cols<W>(team);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        team.publish(warp_part<KIND, W>(x[r], team, cols));
        s[r] = statistics<KIND>(p, team, first_row + r * group);
      }
    };
    if constexpr (C::kKnown) {
      using Of = Weights<KIND, X, R, W, C>;
      using Weight = typename Of::Weight;
      constexpr int kWeights = Of::kCount;
      Weight scale[kWeights], bias[kWeights];
#pragma unroll
      for (int r = 0; r < kWeights; ++r) {
        const auto weight = [&](const Input& whole, int kind) {
          char* const space = dynamic_shared() + kind * Weight::kSharedBytes * static_cast<int>(blockDim.x);
          if constexpr (!C::kHeads) return Weight(team, whole, true, space);
          const int64_t row = first_row + r * group;
          return Weight(team, from(whole, launch.heads.of_row(row < p.rows ? row : first_row) * p.cols));
        };
        scale[r] = weight(p.scale, 0);
        if constexpr (C::kBias) bias[r] = weight(p.bias, 1);
      }
      Y* y[kRows];
      [[maybe_unused]] GranuleWriter<Y, W> writer[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        y[r] = static_cast<Y*>(p.y.data) + (first_row + r * group) * (C::kAdds ? p.cols + p.y_pad : p.cols);
        // Hides that this row lies as far from its array's beginning as the one that was read: the compiler would keep
        // that distance for every vector.
        hide(y[r]);
        if constexpr (W::SHIFTED) writer[r] = {team, y[r]};
      }
      collect();
      if constexpr (Of::kPlace == Place::shared) wait_for_copies();
      for_each_vector<W>(team, [&](int slot, auto first, int left) {
        float factor[W::N], term[W::N];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int64_t row = first_row + r * group;
          if (r < kWeights) {
            scale[r].get(slot, first, left, factor);
            if constexpr (C::kBias) bias[r].get(slot, first, left, term);
#pragma unroll
            for (int i = 0; i < W::N; ++i) factor[i] += p.scale_offset;
          }
          float values[W::N];
          x[r].get(slot, first, left, values);
          finish<KIND, Y, C>(s[r], factor, term, values);
          if constexpr (W::SHIFTED) {
            writer[r].write(slot, first, left, pack<Y>(values), r == 0 || row < p.rows);
          } else if (r == 0 || row < p.rows) {
            store<W::ALIGNED>(y[r] + first, pack<Y>(values), left);
          }
        }
      });
      if constexpr (C::kAdds)
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          if (const int64_t row = first_row + r * group; row < p.rows)
            pad_row<W::N>(p, {p.y.data, kDtype<Y>}, team, row);
    } else if constexpr (C::kGates) {
      collect();
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = first_row + r * group;
        if (r > 0 && row >= p.rows) break;
        X* y = static_cast<X*>(p.y.data) + row * p.cols;
        hide(y);
        finish_gated<W>(p, team, s[r], x[r], from(p.scale, launch.heads.of_row(row) * p.cols), y);
      }
    } else {
      collect();
      for (int r = 0; r < kRows && first_row + r * group < p.rows; ++r)
        finish_row_any<KIND, W>(p, launch.heads, team, s[r], first_row + r * group, x_row[r]);
    }
    first_row += team.count * kRows * group;
  } while (kLoop && first_row < p.rows);
}

// draws_rows, for the device's code.
template <Kind KIND, typename X>
constexpr bool kDraws = draws_rows(KIND, kDtype<X>);

// Clusters whose rows come by way of rings: as many as run at once, each with the next row's statistics under way while
// the blocks exchange those of one.
template <Kind KIND, typename X, typename R, Access ACCESS, typename C>
__device__ __forceinline__ void forward_ring(const Forward& p, const RowsLaunch& launch, char* shared) {
  using W = Walk<X, R, ACCESS>;
  constexpr bool kDrawn = kDraws<KIND, X> && ACCESS == Access::ring;
  using Threads = Team<R::kThreads, std::conditional_t<kDrawn, NotedPart<KIND>, Part<KIND>>, R::kCluster>;
  Threads team(launch.threads_per_row, p.cols, launch.span, launch.reciprocal_cols);
  const auto rows = [&] {
    if constexpr (kDrawn) {
      return launch.drawn_rows(team.index);
    } else {
      return launch.backwards(team.index, 1);
    }
  }();
  using Source = std::remove_const_t<decltype(rows)>;
  using Y = typename C::template Result<X>;
  const Y* const x_data = static_cast<const Y*>(p.x.data);
  const X* const residual_data = static_cast<const X*>(p.residual.data);
  auto ring = [&] {
    if constexpr (C::kAdds) {
      return Ring<Threads, W::N == 1, Source, Y, X>(team, launch.ring, shared, rows, x_data, residual_data);
    } else {
      return Ring<Threads, W::N == 1, Source, Y>(team, launch.ring, shared, rows, x_data);
    }
  }();
  FloatWeight<W> scale(team, p.scale), bias(team, p.bias);
  ring.fill_up();
  scale.arrive(p.scale_offset, 1.0f);
  bias.arrive(0.0f, -0.0f);
  const float cols = warp_cols<W>(team);
  RowOf<X, W, C> x;

  // The statistics of `next` begin before the result of `row` does.
  int64_t row = -1, next = rows.start(0), after = -1;
  [[maybe_unused]] float note = 0;
  if constexpr (kDrawn) note = rows.draw(team);
  for (; row >= 0 || next >= 0; row = next, next = after) {
    if (next >= 0) {
      ring.take();
      const int64_t start = next * p.cols + team.begin;
      if constexpr (C::kAdds) {
        x.read(team, ring.template newest<0>(x_data + start), ring.template newest<1>(residual_data + start));
      } else {
        x.read(team, ring.template newest<0>(x_data + start));
      }
      team.publish(warp_part<KIND, W>(x, team, cols), note);
      ring.met();
      if constexpr (kDrawn) {
        note = rows.draw(team);
        after = ring.upcoming_row();
      } else {
        after = next + rows.step;
      }
    }
    if (row < 0) continue;
    const int64_t start = row * p.cols + team.begin;
    const Statistics s = statistics<KIND>(p, team, row);
    if constexpr (C::kAdds) {
      x.read(team, ring.template oldest<0>(x_data + start), ring.template oldest<1>(residual_data + start));
    } else {
      x.read(team, ring.template oldest<0>(x_data + start));
    }
    Y* const y = static_cast<Y*>(p.y.data) + row * (p.cols + p.y_pad);
    for_each_vector<W>(team, [&](int slot, auto first, int left) {
      float values[W::N];
      x.get(slot, first, left, values);
      if constexpr (C::kAdds) store<true>(static_cast<X*>(p.sum.data) + row * p.cols + first, pack<X>(values), left);
      finish<KIND, Y, C>(s, scale[slot], bias[slot], values);
      store<true>(y + first, pack<Y>(values), left);
    });
    pad_row<W::N>(p, {p.y.data, kDtype<Y>}, team, row);
    if constexpr (kDrawn) ring.note(team.note());
    ring.leave();
  }
}

}  // namespace jaxnorm::cuda
