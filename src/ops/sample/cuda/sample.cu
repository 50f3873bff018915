// The next token of each row of logits. A row is read again in each pass, by a block or by a cluster, in which each
// warp has neighbouring columns:
//
// 1. The maximum, and its column.
// 2. The border of what is kept, if there is a top_k or a top_p: see border.cuh.
// 3. The sum of what is kept, warp by warp.
// 4. The column at which u times the sum is passed: in which warp's columns, of these in which lane's, and which of
// them.
#include "engine/cuda/device.h"
#include "engine/cuda/fragment.cuh"
#include "engine/cuda/launch.cuh"
#include "ops/sample/call.h"
#include "ops/sample/cuda/border.cuh"
#include "ops/shared/cuda/logits.cuh"

namespace jaxnorm::cuda::sampling {
namespace {

constexpr int kFewVectors = 2 * kThreads;  // that need no further block
constexpr int kFar = 4;                    // vectors that a thread has asked for at once, if memory has them
constexpr int kLine = 8;                   // vectors in a line of memory

// Of a warp's columns: the sum of e over what is greater than the border's l, and how many are equal.
struct Part {
  float sum;
  uint32_t equals;
};

struct Shared {
  BorderShared border;
  uint64_t warp_best[kWarps], best[kMostBlocks];
  Part parts[kMostBlocks * kWarps];
};

// The columns of one row that a warp has, in vectors.
template <typename T, bool ALIGNED>
struct Slice {
  static constexpr int N = kVector<T>;
  const T* row;
  RowMask mask;
  int cols, begin, end;

  __device__ Slice(const Sample& p, const MaskLaunch& masks, int64_t index, int span, int warp)
      : row(static_cast<const T*>(p.logits.data) + index * p.cols),
        mask(RowMask::of(masks, index, p.cols)),
        cols(static_cast<int>(p.cols)) {
    cuda::hide(row);  // that each read need not find it again
    const int vectors = (cols + N - 1) / N;
    begin = min(warp * span, vectors);
    end = min(begin + span, vectors);
  }

  // What does not count is -inf.
  __device__ Packed<T, N> hide(Packed<T, N> packed, int col) const {
    return mask.counted<ALIGNED, N>(col, cols - col).choose(packed, kInfinity<T> | kSign<T>);
  }

  __device__ float at(int col) const {
    return col < cols && (!mask.where || mask.where[col]) ? static_cast<float>(row[col]) : -INFINITY;
  }

  // Calls f(l, col) for the vectors first, first + step, ... before `last`, of which col is the first column, and for
  // others of which all l are -inf.
  template <int AHEAD, typename F>
  __device__ void for_each(int first, int last, int step, F f) const {
#pragma unroll 1
    for (; first < last; first += AHEAD * step) {
      Packed<T, N> packed[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int vector = first + i * step, col = vector * N;
#pragma unroll
        for (uint32_t& word : packed[i].word) word = kInfinity<T> | kSign<T>;
        if (vector < last) packed[i] = ALIGNED ? load<true, N>(row + col, N) : load_unaligned<N>(row + col, cols - col);
      }
      if (mask.where || (!ALIGNED && (first + AHEAD * step) * N > cols))
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
          if (first + i * step < last) packed[i] = hide(packed[i], (first + i * step) * N);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        float l[N];
        unpack(packed[i], l);
        f(l, (first + i * step) * N);
      }
    }
  }

  // The same for all vectors, lane by lane.
  template <int AHEAD, typename F>
  __device__ void for_each(F f) const {
    for_each<AHEAD>(begin + lane(), end, kWarp, f);
  }
};

// The key of a row's largest l, and of its columns the first, of which all bits are turned; all ones if an l is NaN or
// +inf. Until here the blocks of a cluster have only arrived.
template <typename T, typename Columns>
__device__ uint64_t find_best(Shared& shared, const Columns& columns) {
  float largest = -INFINITY;
  int first = 0;
  bool is_bad = false;
  columns.template for_each<kFar>([&](const auto& l, int col) {
#pragma unroll
    for (int i = 0; i < Columns::N; ++i) {
      is_bad |= !(l[i] < INFINITY);
      if (l[i] > largest) largest = l[i], first = col + i;
    }
  });
  const uint64_t own = uint64_t{Key<T>::of(largest)} << 32 | ~static_cast<uint32_t>(first);
  const uint64_t of_warp = warp_max(is_bad ? ~uint64_t{0} : own);
  if (lane() == 0) shared.warp_best[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  if (Cluster::blocks() > 1) Cluster::wait();
  if (threadIdx.x < kWarp) {
    const uint64_t best = warp_max(lane() < kWarps ? shared.warp_best[lane()] : 0);
    if (lane() < Cluster::blocks()) *remote(shared.best + Cluster::rank(), lane()) = best;
  }
  meet();
  return warp_max(lane() < Cluster::blocks() ? shared.best[lane()] : 0);
}

// A column, and the sum of e over all that are kept; -1 in the warps of a row that do not have it.
struct Drawn {
  int col = -1;
  float sum = 0;
};

// Draws a column of what is kept, of which log2(e) is no less than `least`.
template <typename Columns>
class Draw {
 public:
  __device__ Draw(const Columns& columns, const Exponent& exponent, const Border& border, float least)
      : columns_(columns), exponent_(exponent), border_(border), least_(least), equals_(border.equals) {}

  __device__ Drawn draw(Shared& shared, float uniform) {
    const Part sums = part_of(columns_.begin + lane(), columns_.end, kWarp);
    const Part of_warp{group_sum<kWarp>(sums.sum), group_sum<kWarp>(sums.equals)};
    const int own = Cluster::rank() * kWarps + threadIdx.x / kWarp;
    if (lane() < Cluster::blocks()) *remote(shared.parts + own, lane()) = of_warp;
    meet();

    // Every warp finds the one that has the column.
    constexpr int kOfLane = kMostBlocks * kWarps / kWarp;
    const auto part_at = [&](int i) { return i < Cluster::blocks() * kWarps ? shared.parts[i] : Part{}; };
    Part of_lane{};
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) add(of_lane, part_at(lane() * kOfLane + i));
    const float all = __shfl_sync(kAll, warp_scan(kept(of_lane, warp_scan(of_lane.equals))), kWarp - 1);
    rest_ = uniform * all;
    const int parts = select(of_lane) * kOfLane;
    if (parts + select(lane() < kOfLane ? part_at(parts + lane()) : Part{}) != own) return {};

    // Of its vectors each lane has some, then of these each one's columns.
    int vectors = (columns_.end - columns_.begin + kWarp - 1) / kWarp;
    const int begin = columns_.begin + lane() * vectors;
    int col = columns_.begin + select(part_of(begin, min(begin + vectors, columns_.end), 1)) * vectors;
    col *= Columns::N;
    for (int cols = vectors * Columns::N; cols > 1;) {
      const int step = (cols + kWarp - 1) / kWarp;
      Part part{};
      for (int i = lane() * step; i < min((lane() + 1) * step, cols); ++i) add(part, columns_.at(col + i));
      col += select(part) * step;
      cols = step;
    }
    return {col, all};
  }

 private:
  // 0 where l is not taken: chosen before, since a branch for each e would take longer.
  __device__ float e_of(float l, bool is_taken) const {
    const float log2_e = exponent_.log2_of(l);
    return exp2_estimate(is_taken && log2_e >= least_ ? log2_e : -INFINITY);
  }

  __device__ static void add(Part& part, const Part& more) { part.sum += more.sum, part.equals += more.equals; }
  __device__ void add(Part& part, float l) const {
    part.sum += e_of(l, l > border_.l);
    part.equals += l == border_.l;
  }

  __device__ Part part_of(int first, int last, int step) const {
    Part part{};
    columns_.template for_each<kNear>(first, last, step, [&](const auto& l, int) {
#pragma unroll
      for (int i = 0; i < Columns::N; ++i) add(part, l[i]);
    });
    return part;
  }

  // How many of equals are left after so many.
  __device__ uint32_t left_of(uint32_t equals) const { return equals_ - min(equals_, equals); }

  // The sum of what is kept of a part, with which there are so many equals.
  __device__ float kept(const Part& part, uint32_t equals_until) const {
    return part.sum + static_cast<float>(min(part.equals, left_of(equals_until - part.equals))) * e_of(border_.l, true);
  }

  // The first lane with whose part the rest is passed, or else the last that keeps any of it. From then on rest and
  // equals are what is left behind the parts before.
  __device__ int select(const Part& part) {
    const uint32_t equals = warp_scan(part.equals);
    const float sum = kept(part, equals), until = warp_scan(sum);
    const unsigned passing = __ballot_sync(kAll, sum > 0 && until > rest_), keeping = __ballot_sync(kAll, sum > 0);
    const int selected = passing ? __ffs(passing) - 1 : kWarp - 1 - __clz(keeping);
    rest_ = __shfl_sync(kAll, rest_ - (until - sum), selected);
    equals_ = __shfl_sync(kAll, left_of(equals - part.equals), selected);
    return selected;
  }

  const Columns& columns_;
  const Exponent& exponent_;
  const Border border_;
  const float least_;
  float rest_ = 0;
  uint32_t equals_;
};

template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(kThreads, 2) sample_kernel(Sample p, MaskLaunch masks, int span, float units) {
  __shared__ Shared shared;
  if (Cluster::blocks() > 1) Cluster::arrive();
  const int64_t index = blockIdx.x / Cluster::blocks();
  const float uniform = __ldg(p.uniform + index), temperature = __ldg(p.temperature + index);
  const int top_k = p.top_k ? __ldg(p.top_k + index) : 0;
  const float top_p = p.top_p ? __ldg(p.top_p + index) : 1, min_p = p.min_p ? __ldg(p.min_p + index) : 0;

  const int warp = Cluster::rank() * kWarps + threadIdx.x / kWarp;
  using Columns = Slice<T, ALIGNED>;
  const Columns columns(p, masks, index, span, warp);
  const uint64_t best = find_best<T>(shared, columns);
  const float largest = Key<T>::value(static_cast<uint32_t>(best >> 32));
  const bool is_good = largest > -INFINITY && temperature >= 0 && temperature < INFINITY && top_k >= -1 &&
                       top_p == top_p && min_p >= 0 && uniform >= 0 && uniform < 1;
  if (!is_good || temperature == 0 || top_k == 1 || top_p <= 0 || min_p > 1) {
    if (warp == 0 && lane() == 0) {
      p.ids[index] = is_good ? static_cast<int>(~static_cast<uint32_t>(best)) : -1;
      p.log_probs[index] = is_good ? 0.0f : NAN;
    }
    return;
  }
  const Exponent exponent(largest, temperature);
  Border border{-INFINITY, 0};
  const bool has_top_k = top_k > 0 && top_k < p.cols, has_top_p = top_p < 1;
  if (has_top_k || has_top_p)
    border = Search<T, Columns>(shared.border, columns, exponent, units, has_top_p).find(has_top_k ? top_k : 0, top_p);
  // An e that rounds to 1 is 1.
  const float least = log2f(min_p) - 0x1p-24f;
  const Drawn drawn = Draw<Columns>(columns, exponent, border, least).draw(shared, uniform);
  if (drawn.col < 0 || lane() > 0) return;
  p.ids[index] = drawn.col;
  p.log_probs[index] = exponent.distance(columns.at(drawn.col)) / (temperature * exponent.power) - logf(drawn.sum);
}

template <typename T>
cudaError_t launch(const Sample& p, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.logits) && is_aligned_for<N>(p.mask);
  const int64_t vectors = ceil_div(p.cols, N);
  int blocks = 1;
  while (blocks < kMostBlocks && blocks * kFewVectors < vectors && current_device().has_clusters()) blocks *= 2;
  // Of whole lines of memory.
  const int span = static_cast<int>(ceil_div(ceil_div(vectors, int64_t{blocks} * kWarps), kLine) * kLine);
  // A sum of losses, each less than 1 / 32 of the largest e, is less than 2^32.
  const auto units = static_cast<float>(std::min<int64_t>(1 << 22, (int64_t{1} << 37) / std::max<int64_t>(1, p.cols)));
  const Plan plan{kThreads, kStreamed, 1, blocks};
  return launch_groups(is_aligned ? sample_kernel<T, true> : sample_kernel<T, false>, plan, p.rows, 0, stream, p,
                       MaskLaunch(p.mask), span, units);
}

}  // namespace
}  // namespace jaxnorm::cuda::sampling

namespace jaxnorm::cuda {

Outcome run(const Sample& p, Stream stream) {
  if (p.rows == 0) return {cudaSuccess};
  return {with_dtype(p.logits.dtype, [&](auto x) { return sampling::launch<decltype(x)>(p, stream); })};
}

}  // namespace jaxnorm::cuda
