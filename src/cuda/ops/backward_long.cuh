// The backward of f32 rows of which a cluster's shared memory holds one and the beginning of the next. They lie in
// pipelines of vectors, each thread's own: once dx of a vector is stored its place is filled again, and nobody else is
// asked.
#pragma once

#include "cuda/engine/partials.h"
#include "cuda/ops/backward_row.cuh"

namespace jaxnorm::cuda {

// A thread's vectors of x and dy: those of a row, behind them those of the thread group's next. It has all that there
// is room for on their way or at hand.
template <typename X, typename Tile>
class VectorPipeline {
 public:
  static constexpr int kPlaces = 13, kBytes = kPlaces * 2 * 16;  // bytes: of a thread
  static_assert(kPlaces > Tile::VECTORS);

  template <typename ThreadGroup>
  __device__ VectorPipeline(const ThreadGroup& group, char* shared, const Rows& rows, const Backward& p)
      : shared_(shared + threadIdx.x * 16),
        rows_(rows),
        x_stride_(p.cols),
        dy_stride_(p.cols + p.dy_pad),
        row_(rows.start(0)) {
    const int64_t first = group.begin + first_of_thread<Tile>(group);
    x_ = static_cast<const X*>(p.x.data) + first;
    dy_ = static_cast<const X*>(p.dy.data) + first;
    left_ = static_cast<int>(group.end - first);
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) acquire(i);
  }

  // Waits for a vector of the row. They are waited for one after the other, in two batches.
  __device__ void wait(int slot) const {
    constexpr int kHalf = Tile::VECTORS / 2;
    if (slot == 0) wait_for_copies_but<kPlaces - kHalf>();
    if (slot == kHalf) wait_for_copies_but<kPlaces - Tile::VECTORS>();
  }

  __device__ void get(int slot, float (&x)[Tile::N], float (&dy)[Tile::N]) const {
    unpack(load_shared<Tile::N>(x_place(slot)), x);
    unpack(load_shared<Tile::N>(dy_place(slot)), dy);
  }

  // Nobody looks at this vector of the row any more. They are left one after the other.
  __device__ void release(int slot) { acquire(slot + kPlaces); }

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
    const int column = i % Tile::VECTORS * Tile::STRIDE, left = left_ - column;
    if (left > 0 && rows_.has(row)) {
      copy(x_place(i), x_ + row * x_stride_ + column, left);
      copy(dy_place(i), dy_ + row * dy_stride_ + column, left);
    }
    commit_copies();
  }

  __device__ static void copy(X* to, const X* from, int left) {
    if constexpr (Tile::ALIGNED) {
      copy_to_shared(reinterpret_cast<char*>(to), from);
    } else {
      float values[Tile::N];
      unpack(load<false, Tile::N>(from, left), values);
      store_shared(to, values);
    }
  }

  char* const shared_;
  const Rows rows_;
  const int64_t x_stride_, dy_stride_;
  const X *x_, *dy_;  // the thread's first column
  int left_;          // how many columns there are from it on
  int64_t row_;       // that is looked at
  int begin_ = 0;     // the place of its first vector
};

// What sums and dx of the pipeline's row are computed from. LAST: whether this is the last look at it.
template <typename Tile, typename Pipeline, bool LAST>
struct PipelineOperands {
  struct Rest {};
  Pipeline& pipeline;

  __device__ Rest get(int slot, int64_t, int left, float (&x)[Tile::N], float (&dy)[Tile::N]) const {
    if (!LAST) pipeline.wait(slot);
    if (left > 0) return pipeline.get(slot, x, dy), Rest{};
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

  template <typename Rest>
  __device__ void store(const Rest& rest, int slot, int64_t first, int left, float (&vector)[Tile::N],
                        const float (&x_hat)[Tile::N], const float (&factor)[Tile::N]) const {
    result.store(rest, slot, first, left, vector, x_hat, factor);
    pipeline.release(slot);
  }
};

// Of RMS norm, which has registers for the sums of so many elements. RARE: there may be a dbias, and arrays need not be
// aligned.
template <typename X, bool RARE>
using LongTiling = Tiling<X, Regime<kWholeBlock, 2 * kElements / kVector<X>, kMaxCluster>,
                          RARE ? Access::elementwise : Access::vectors>;

template <typename X, bool ADD, bool RARE>
__device__ __forceinline__ void backward_long(const Backward& p, const Partials& partials, const RowsLaunch& launch,
                                              char* shared) {
  using Tile = LongTiling<X, RARE>;
  using Pipeline = VectorPipeline<X, Tile>;
  ThreadGroup<kWholeBlock, RowSums<Kind::rms>, kMaxCluster> group(launch.threads_per_row, p.cols, launch.span,
                                                                  launch.reciprocal_cols);
  const Rows rows = launch.backwards(group.index, 1);
  FloatWeight<Tile> scale(group, p.scale);
  scale.arrive(p.scale_offset, 1.0f);
  Pipeline pipeline(group, shared, rows, p);
  ColumnSums<Tile> dscale;
  std::conditional_t<RARE, ColumnSums<Tile>, NoSums> dbias;
  RowStatistics fetched;
  fetched.template fetch<Kind::rms>(p, rows.start(0));
  for (int64_t row = rows.start(0); rows.has(row); row += rows.step) {
    const RowStatistics s = fetched;
    fetched.template fetch<Kind::rms>(p, row + rows.step);
    const X* const dsum = p.dsum.data ? static_cast<const X*>(p.dsum.data) + row * p.cols : nullptr;
    if constexpr (ADD)
      for_each_vector<Tile>(group, [&](int, auto first, int left) {
        constexpr int of_line = 8;  // threads
        if (dsum && left > 0 && threadIdx.x % of_line == 0) prefetch(dsum + first);
      });
    group.publish(
        warp_sums<Kind::rms, Tile>(group, s, PipelineOperands<Tile, Pipeline, false>{pipeline}, scale, dscale, dbias));
    const RowSums<Kind::rms> sums = group.collect();
    if (p.dx.data) {
      using Added = std::conditional_t<ADD, MemoryAdded<X, Tile>, NothingAdded>;
      Added added{};
      if constexpr (ADD) added.row = dsum;
      using Result = DxResult<Tile, X, Added>;
      const LastResult<Tile, Result, Pipeline> result{{added, static_cast<X*>(p.dx.data) + row * p.cols}, pipeline};
      store_dx<Kind::rms, Tile>(group, s, sums, PipelineOperands<Tile, Pipeline, true>{pipeline}, scale, result);
    } else {
#pragma unroll
      for (int slot = 0; slot < Tile::VECTORS; ++slot) pipeline.release(slot);
    }
    pipeline.next_row();
  }
  const auto write = [&](const auto& sums, float* to) {
    if (to) sums.write(group, 1, 1, 0, nullptr, to + group.index * p.cols);
  };
  write(dscale, partials.dscale);
  if constexpr (RARE) write(dbias, partials.dbias);
}

template <typename X, bool ADD, bool RARE>
__global__ void __launch_bounds__(kMaxThreads)
    backward_long_kernel(const __grid_constant__ Backward p, const __grid_constant__ Partials partials,
                         const __grid_constant__ RowsLaunch launch) {
  if constexpr (kHasClusters) backward_long<X, ADD, RARE>(p, partials, launch, dynamic_shared());
}

// cudaErrorNotSupported where shared memory has no room.
template <typename X>
cudaError_t launch_long(const Backward& p, const Plan& plan, const RowSchedule& schedule, const Partials& partials,
                        bool aligned, cudaStream_t stream) {
  RowsLaunch launch(plan, p.cols, kVector<X>, p.weight_rows);
  launch.take_turns(schedule.step, schedule.end);
  const int bytes = plan.block_threads() * VectorPipeline<X, LongTiling<X, false>>::kBytes;
  if (bytes > current_device().shared_bytes - kOwnBytes) return cudaErrorNotSupported;
  const auto kernel = !aligned || p.dbias ? backward_long_kernel<X, true, true>
                      : p.dsum            ? backward_long_kernel<X, true, false>
                                          : backward_long_kernel<X, false, false>;
  return launch_groups(kernel, plan, schedule.blocks, bytes, stream, p, partials, launch);
}

}  // namespace jaxnorm::cuda
