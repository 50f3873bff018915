// The gradient of rows of which a cluster's shared memory holds one and the beginning of the next. They lie in
// pipelines of vectors, each thread's own: once dx of a vector is stored its place is filled again, and nobody else is
// asked.
#pragma once

#include "engine/cuda/grad_row.cuh"
#include "engine/cuda/grad_schedule.h"

namespace jaxnorm::cuda {

// A thread's vectors of x and dy: those of a row, behind them those of the thread group's next. It has all that there
// is room for on their way or at hand.
template <typename X, typename Tile>
class VectorPipeline {
 public:
  static constexpr int kPlaces = 13, kBytes = kPlaces * 2 * 16;  // bytes: of a thread
  static_assert(kPlaces > Tile::VECTORS);

  template <typename Group, typename Call>
  __device__ VectorPipeline(const Group& group, char* shared, const Rows& rows, const Call& p)
      : shared_(shared + threadIdx.x * 16),
        rows_(rows),
        x_stride_(p.cols),
        dy_stride_(p.cols + p.dy_pad),
        row_(rows.start(0)) {
    const int64_t first = group.begin + first_of_thread<Tile>(group);
    x_ = static_cast<const X*>(p.x.data) + first;
    dy_ = static_cast<const X*>(p.dy.data) + first;
    remaining_ = static_cast<int>(group.end - first);
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) acquire(i);
  }

  // Waits for a vector of the row. They are waited for one after the other, in two batches.
  __device__ void wait(int vec) const {
    constexpr int kHalf = Tile::VECTORS / 2;
    if (vec == 0) wait_for_copies_but<kPlaces - kHalf>();
    if (vec == kHalf) wait_for_copies_but<kPlaces - Tile::VECTORS>();
  }

  __device__ void get(int vec, float (&x)[Tile::N], float (&dy)[Tile::N]) const {
    unpack(load_shared<Tile::N>(x_place(vec)), x);
    unpack(load_shared<Tile::N>(dy_place(vec)), dy);
  }

  // Nobody looks at this vector of the row any more. Vectors are released one after the other.
  __device__ void release(int vec) { acquire(vec + kPlaces); }

  __device__ void next_row() {
    row_ += rows_.step;
    begin_ = (begin_ + Tile::VECTORS) % kPlaces;
  }

 private:
  __device__ X* x_place(int i) const {
    int place = begin_ + i % kPlaces;
    if (place >= kPlaces) place -= kPlaces;
    return reinterpret_cast<X*>(shared_ + place * 32 * static_cast<int>(blockDim.x));
  }
  __device__ X* dy_place(int i) const { return x_place(i) + blockDim.x * Tile::N; }

  // Starts to copy the i-th vector from the row's first on, if there is one.
  __device__ void acquire(int i) {
    const int64_t row = row_ + i / Tile::VECTORS * rows_.step;
    const int column = i % Tile::VECTORS * Tile::STRIDE, remaining = remaining_ - column;
    if (remaining > 0 && rows_.has(row)) {
      copy(x_place(i), x_ + row * x_stride_ + column, remaining);
      copy(dy_place(i), dy_ + row * dy_stride_ + column, remaining);
    }
    commit_copies();
  }

  __device__ static void copy(X* to, const X* from, int remaining) {
    if constexpr (Tile::ALIGNED) {
      copy_to_shared(reinterpret_cast<char*>(to), from);
    } else {
      float values[Tile::N];
      unpack(load<false, Tile::N>(from, remaining), values);
      store_shared(to, values);
    }
  }

  char* const shared_;
  const Rows rows_;
  const int64_t x_stride_, dy_stride_;
  const X *x_, *dy_;  // the thread's first column
  int remaining_;     // how many columns there are from it on
  int64_t row_;       // that is looked at
  int begin_ = 0;     // the place of its first vector
};

// What sums and dx of the pipeline's row are computed from. LAST: whether this is the last look at it.
template <typename Tile, typename Pipeline, bool LAST>
struct PipelineOperands {
  Pipeline& pipeline;

  __device__ NothingKept get(int vec, int64_t, int remaining, float (&x)[Tile::N], float (&dy)[Tile::N]) const {
    if (!LAST) pipeline.wait(vec);
    if (remaining > 0) return pipeline.get(vec, x, dy), NothingKept{};
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) x[i] = dy[i] = 0;
    return {};
  }
};

// Stores dx of a vector, which the pipeline does not need to keep then.
template <typename Tile, typename Result, typename Pipeline>
struct LastResult {
  const Result result;
  Pipeline& pipeline;

  template <typename Kept, typename Factor>
  __device__ void store(const Kept& kept, int vec, int64_t col, int remaining, float (&vector)[Tile::N],
                        const float (&x_hat)[Tile::N], const Factor& factor) const {
    result.store(kept, vec, col, remaining, vector, x_hat, factor);
    pipeline.release(vec);
  }
};

template <typename Op>
constexpr Access kLongAccess = Op::kWeights > 1 ? Access::elementwise : Access::vectors;

// Twice as many elements a thread as other rows have, for whose sums an op with one sum a row has registers.
template <typename Op>
using LongTiling =
    Tiling<typename Op::X, Regime<kWholeBlock, 2 * kElements / kVector<typename Op::X>, kMaxCluster>, kLongAccess<Op>>;

// What is rare has one kernel: with two weights arrays need not be aligned.
template <typename Op>
__device__ __forceinline__ void long_rows(const GradCall<typename Op::State>& p, const Partials& partials,
                                          const GradRowsLaunch& launch, char* shared) {
  using X = typename Op::X;
  using Tile = LongTiling<Op>;
  using Pipeline = VectorPipeline<X, Tile>;
  constexpr bool kAdds = Op::kExtra == Extra::in_memory;
  ThreadGroup<kWholeBlock, Sums<1>, kMaxCluster> group(launch.threads_per_row, p.cols, launch.span,
                                                       launch.reciprocal_cols);
  const Rows rows = launch.backwards(group.index, 1);
  ScaleOf<Op, Tile> scale(group, p.scale);
  scale.arrive(p.scale_offset, 1.0f);
  Pipeline pipeline(group, shared, rows, p);
  std::conditional_t<(Op::kWeights > 0), ColumnSums<Tile>, NoColumnSums> dscale;
  std::conditional_t<(Op::kWeights > 1), ColumnSums<Tile>, NoColumnSums> dbias;
  typename Op::Scalars fetched{};
  fetch_scalars<Op>(p, rows.start(0), fetched);
  for (int64_t row = rows.start(0); rows.has(row); row += rows.step) {
    const typename Op::Scalars s = fetched;
    fetch_scalars<Op>(p, row + rows.step, fetched);
    const X* const extra = p.extra.data ? static_cast<const X*>(p.extra.data) + row * p.cols : nullptr;
    if constexpr (kAdds)
      for_each_vector<Tile>(group, [&](int, auto col, int remaining) {
        constexpr int threads_of_line = 8;
        if (extra && remaining > 0 && threadIdx.x % threads_of_line == 0) prefetch(extra + col);
      });
    group.publish(
        warp_sums<Op, Tile>(group, s, PipelineOperands<Tile, Pipeline, false>{pipeline}, scale, dscale, dbias));
    const auto sums = group.collect();
    if (Op(p.state).has_result(p.dx)) {
      const auto place = [&](void* array) { return static_cast<X*>(array) + row * p.cols; };
      const auto finish = [&](const auto& added) {
        const auto result = Op(p.state).template result<Tile>(p.dx, added, place);
        finish_row<Op, Tile>(group, s, sums, PipelineOperands<Tile, Pipeline, true>{pipeline}, scale,
                             LastResult<Tile, decltype(result), Pipeline>{result, pipeline});
      };
      if constexpr (kAdds) {
        finish(MemoryAdded<X, Tile>{extra});
      } else {
        finish(NothingAdded{});
      }
    } else {
#pragma unroll
      for (int vec = 0; vec < Tile::VECTORS; ++vec) pipeline.release(vec);
    }
    pipeline.next_row();
  }
  const auto write = [&](const auto& sums, float* to) {
    if (to) sums.write(group, 1, 1, 0, nullptr, to + group.index * p.cols);
  };
  if constexpr (Op::kWeights > 0) write(dscale, partials.dscale);
  if constexpr (Op::kWeights > 1) write(dbias, partials.dbias);
}

template <typename Op>
__global__ void __launch_bounds__(kMaxThreads)
    long_rows_kernel(const __grid_constant__ GradCall<typename Op::State> p, const __grid_constant__ Partials partials,
                     const __grid_constant__ GradRowsLaunch launch) {
  if constexpr (kHasClusters) long_rows<Op>(p, partials, launch, dynamic_shared());
}

template <typename Op>
int long_rows_bytes(const Plan& plan) {
  return plan.block_threads() * VectorPipeline<typename Op::X, LongTiling<Op>>::kBytes;
}

// Whether shared memory has room for such rows.
template <typename Op>
bool has_room_for_long_rows(const Plan& plan) {
  return long_rows_bytes<Op>(plan) <= current_device().shared_bytes - kOwnBytes;
}

template <typename Op>
cudaError_t launch_long_rows(const GradCall<typename Op::State>& p, const Plan& plan, const GradRoom& room,
                             cudaStream_t stream) {
  GradRowsLaunch launch(plan, p.cols, kVector<typename Op::X>, {});
  launch.set_grid_stride(room.schedule.stride, room.schedule.end);
  return launch_groups(long_rows_kernel<Op>, plan, room.schedule.blocks, long_rows_bytes<Op>(plan), stream, p,
                       room.partials, launch);
}

}  // namespace jaxnorm::cuda
