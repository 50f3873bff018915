// The forward of a thread group's rows: their statistics, and the epilogue from registers, shared memory or, of calls
// that are not known to the compiler, from memory again.
#pragma once

#include "cuda/engine/launch.cuh"
#include "cuda/engine/weight.cuh"
#include "cuda/ops/gated_row.cuh"

namespace jaxnorm::cuda {

template <typename X, typename Tile, typename C>
using RowOf =
    std::conditional_t<C::kGates, GatedRow<X, Tile, C::kFirst>,
                       std::conditional_t<C::kAdds, SumRow<typename C::template Result<X>, X, Tile>, Row<X, Tile>>>;

// What holds the weights of a call that is known: scale and, if there is one, bias. kCount of each, which is one for
// each row that a thread group has under way if these are of several heads.
template <Kind KIND, typename X, typename R, typename Tile, typename C>
struct Weights {
  using T = typename C::Weight;
  static constexpr int kRows = kRowsAtOnce<R, C>, kCount = C::kPerHead ? kRows : 1, kKinds = C::kBias ? 2 : 1;
  // Of a thread, with its rows and its weights.
  static constexpr int kRegisters =
      Tile::VECTORS * Tile::N * static_cast<int>(kRows * sizeof(X) + kCount * kKinds * sizeof(T)) / 4;
  static constexpr bool kSameType = sizeof(T) == sizeof(X), kLarger = sizeof(T) > sizeof(X), kVectors = Tile::N > 1;
  // There is no room in registers for those of layer norm, nor for f32 beside a half type. Where a thread has more of
  // them than here, the way through shared memory takes longer than loading them late.
  static constexpr bool kShared = kVectors && !C::kPerHead &&
                                  (kSameType ? KIND == Kind::layer && R::kThreads == kWholeBlock && R::kVectors == 4
                                             : kLarger && R::kThreads == 8 && R::kVectors <= 2);
  static constexpr Place kPlace = kShared                                     ? Place::shared
                                  : kVectors && kSameType && kRegisters <= 32 ? Place::registers
                                                                              : Place::memory;
  using Weight = PackedWeight<T, Tile, kPlace>;
  static constexpr int kSharedBytes = Weight::kSharedBytes * kKinds;  // of a thread
};

// Teams whose rows do not come by way of a pipeline. A thread group has several rows under way at once if they are
// short.
template <Kind KIND, typename X, typename R, Access ACCESS, typename C>
__device__ __forceinline__ void forward_rows(const Forward& p, const RowsLaunch& launch) {
  using Tile = std::conditional_t<C::kSpecialised || ACCESS == Access::vectors, Tiling<X, R, ACCESS>,
                                  RereadTiling<X, R, ACCESS>>;
  using Y = typename C::template Result<X>;
  using Threads = ThreadGroup<R::kThreads, Part<KIND>, R::kCluster>;
  Threads group(launch.threads_per_row, p.cols, launch.span, launch.reciprocal_cols);
  const int64_t block_rows = R::kThreads == kWholeBlock ? 1 : launch.rows_per_block;
  constexpr int kRows = Tile::KEPT ? kRowsAtOnce<R, C> : 1;

  // A grid holds a thread group for every row. Yet a loop keeps the compiler from having more under way than it has
  // registers for, where rows go by elements or have many vectors and a gate or a residual.
  constexpr bool kLoop = Tile::N == 1 || ((C::kGates || C::kAdds) && Tile::VECTORS == 8);
  int64_t first_row = group.index * kRows * block_rows + group.place;
  if (first_row >= p.rows) return;
  do {
    RowOf<X, Tile, C> x[kRows];
    Statistics s[kRows];
    const Y* x_row[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // Past the last row, the first one again.
      const int64_t row = first_row + r * block_rows, start = (row < p.rows ? row : first_row) * p.cols;
      x_row[r] = static_cast<const Y*>(p.x.data) + start;
      // Or each vector's address would be computed from the array's beginning. RMS norm by elements has no registers
      // for the row's.
      if constexpr (Tile::N > 1 || KIND == Kind::layer) hide(x_row[r]);
      if constexpr (C::kAdds) {
        x[r].read(group, x_row[r], static_cast<const X*>(p.residual.data) + start, static_cast<X*>(p.sum.data) + start,
                  row < p.rows);
      } else if constexpr (C::kGates) {
        x[r].read(group, x_row[r], static_cast<const X*>(p.gate.data.data) + start, p.gate.activation);
      } else {
        x[r].read(group, x_row[r]);
      }
    }
    const auto collect = [&] {
      const float cols = warp_cols<Tile>(group);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        group.publish(warp_part<KIND, Tile>(x[r], group, cols));
        s[r] = statistics<KIND>(p, group, first_row + r * block_rows);
      }
    };
    if constexpr (C::kSpecialised) {
      using Of = Weights<KIND, X, R, Tile, C>;
      using Weight = typename Of::Weight;
      constexpr int kWeights = Of::kCount;
      Weight scale[kWeights], bias[kWeights];
#pragma unroll
      for (int r = 0; r < kWeights; ++r) {
        const auto weight = [&](const Input& whole, int kind) {
          char* const space = dynamic_shared() + kind * Weight::kSharedBytes * static_cast<int>(blockDim.x);
          if constexpr (!C::kPerHead) return Weight(group, whole, true, space);
          const int64_t row = first_row + r * block_rows;
          return Weight(group, from(whole, launch.weight_rows.of_row(row < p.rows ? row : first_row) * p.cols));
        };
        scale[r] = weight(p.scale, 0);
        if constexpr (C::kBias) bias[r] = weight(p.bias, 1);
      }
      Y* y[kRows];
      [[maybe_unused]] UnalignedWriter<Y, Tile> writer[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        y[r] = static_cast<Y*>(p.y.data) + (first_row + r * block_rows) * (C::kAdds ? p.cols + p.y_pad : p.cols);
        // Hides that this row lies as far from its array's beginning as the one that was read: the compiler would keep
        // that distance for every vector.
        hide(y[r]);
        if constexpr (Tile::UNALIGNED) writer[r] = {group, y[r]};
      }
      collect();
      if constexpr (Of::kPlace == Place::shared) wait_for_copies();
      for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
        float factor[Tile::N], term[Tile::N];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int64_t row = first_row + r * block_rows;
          if (r < kWeights) {
            scale[r].get(slot, first, left, factor);
            if constexpr (C::kBias) bias[r].get(slot, first, left, term);
#pragma unroll
            for (int i = 0; i < Tile::N; ++i) factor[i] += p.scale_offset;
          }
          float values[Tile::N];
          x[r].get(slot, first, left, values);
          finish<KIND, Y, C>(s[r], factor, term, values);
          if constexpr (Tile::UNALIGNED) {
            writer[r].write(slot, first, left, pack<Y>(values), r == 0 || row < p.rows);
          } else if (r == 0 || row < p.rows) {
            store<Tile::ALIGNED>(y[r] + first, pack<Y>(values), left);
          }
        }
      });
      if constexpr (C::kAdds)
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          if (const int64_t row = first_row + r * block_rows; row < p.rows)
            pad_row<Tile::N>(p, {p.y.data, kDtype<Y>}, group, row);
    } else if constexpr (C::kGates) {
      collect();
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = first_row + r * block_rows;
        if (r > 0 && row >= p.rows) break;
        X* y = static_cast<X*>(p.y.data) + row * p.cols;
        hide(y);
        finish_gated<Tile>(p, group, s[r], x[r], from(p.scale, launch.weight_rows.of_row(row) * p.cols), y);
      }
    } else {
      collect();
      for (int r = 0; r < kRows && first_row + r * block_rows < p.rows; ++r)
        finish_row_generic<KIND, Tile>(p, launch.weight_rows, group, s[r], first_row + r * block_rows, x_row[r]);
    }
    first_row += group.count * kRows * block_rows;
  } while (kLoop && first_row < p.rows);
}

// draws_rows, for the device's code.
template <Kind KIND, typename X>
constexpr bool kIsDynamic = is_dynamic(KIND, kDtype<X>);

// Clusters whose rows come by way of pipelines: as many as run at once, each with the next row's statistics under way
// while the blocks exchange those of one.
template <Kind KIND, typename X, typename R, Access ACCESS, typename C>
__device__ __forceinline__ void forward_pipelined(const Forward& p, const RowsLaunch& launch, char* shared) {
  using Tile = Tiling<X, R, ACCESS>;
  constexpr bool kDynamic = kIsDynamic<KIND, X> && ACCESS == Access::pipelined;
  using Threads = ThreadGroup<R::kThreads, std::conditional_t<kDynamic, TicketPart<KIND>, Part<KIND>>, R::kCluster>;
  Threads group(launch.threads_per_row, p.cols, launch.span, launch.reciprocal_cols);
  const auto rows = [&] {
    if constexpr (kDynamic) {
      return launch.dynamic_rows(group.index);
    } else {
      return launch.backwards(group.index, 1);
    }
  }();
  using Source = std::remove_const_t<decltype(rows)>;
  using Y = typename C::template Result<X>;
  const Y* const x_data = static_cast<const Y*>(p.x.data);
  const X* const residual_data = static_cast<const X*>(p.residual.data);
  auto pipeline = [&] {
    if constexpr (C::kAdds) {
      return Pipeline<Threads, Tile::N == 1, Source, Y, X>(group, launch.pipeline, shared, rows, x_data, residual_data);
    } else {
      return Pipeline<Threads, Tile::N == 1, Source, Y>(group, launch.pipeline, shared, rows, x_data);
    }
  }();
  FloatWeight<Tile> scale(group, p.scale), bias(group, p.bias);
  pipeline.acquire_rest();
  scale.arrive(p.scale_offset, 1.0f);
  bias.arrive(0.0f, -0.0f);
  const float cols = warp_cols<Tile>(group);
  RowOf<X, Tile, C> x;

  // The statistics of `next` begin before the result of `row` does.
  int64_t row = -1, next = rows.start(0), after = -1;
  [[maybe_unused]] float ticket = 0;
  if constexpr (kDynamic) ticket = rows.take_ticket(group);
  for (; row >= 0 || next >= 0; row = next, next = after) {
    if (next >= 0) {
      pipeline.wait();
      const int64_t start = next * p.cols + group.begin;
      if constexpr (C::kAdds) {
        x.read(group, pipeline.template newest<0>(x_data + start), pipeline.template newest<1>(residual_data + start));
      } else {
        x.read(group, pipeline.template newest<0>(x_data + start));
      }
      group.publish(warp_part<KIND, Tile>(x, group, cols), ticket);
      pipeline.synced();
      if constexpr (kDynamic) {
        ticket = rows.take_ticket(group);
        after = pipeline.upcoming_row();
      } else {
        after = next + rows.step;
      }
    }
    if (row < 0) continue;
    const int64_t start = row * p.cols + group.begin;
    const Statistics s = statistics<KIND>(p, group, row);
    if constexpr (C::kAdds) {
      x.read(group, pipeline.template oldest<0>(x_data + start), pipeline.template oldest<1>(residual_data + start));
    } else {
      x.read(group, pipeline.template oldest<0>(x_data + start));
    }
    Y* const y = static_cast<Y*>(p.y.data) + row * (p.cols + p.y_pad);
    for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
      float values[Tile::N];
      x.get(slot, first, left, values);
      if constexpr (C::kAdds) store<true>(static_cast<X*>(p.sum.data) + row * p.cols + first, pack<X>(values), left);
      finish<KIND, Y, C>(s, scale[slot], bias[slot], values);
      store<true>(y + first, pack<Y>(values), left);
    });
    pad_row<Tile::N>(p, {p.y.data, kDtype<Y>}, group, row);
    if constexpr (kDynamic) pipeline.ticket(group.ticket());
    pipeline.release();
  }
}

}  // namespace jaxnorm::cuda
