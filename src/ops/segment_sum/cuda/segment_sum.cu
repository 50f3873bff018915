// Sums of segments, whose positions are sorted.
//
// Positions and segments are merged to one list, in which a segment stands behind its positions: a position is read and
// added, a segment is written. Chunks of this list are equally long whatever the ids are, so that a segment without
// positions and one with most of them cost what they read and write. A segment that chunks share is added up by a
// second kernel, in the order of chunks.
#include <climits>

#include "cuda/engine/launch.cuh"
#include "ops/segment_sum/call.h"

namespace jaxnorm::cuda {
namespace {

constexpr int kChunk = 64, kThreads = 256;  // items of the list; threads of a block
constexpr int kAhead = 4;                   // how many rows a thread has asked for at once
// Of the second kernel: the warps of a block, and how many chunks it looks at; how many of a segment one warp adds up,
// and how many it has asked for at once.
constexpr int kMergeWarps = 16, kFewChunks = 16, kTailsAhead = 8;

// A chunk's part of the list: positions [first, last), and segments from `segment` to before `end`.
struct Chunk {
  int first, last, segment, end;

  // Whether its first segment has positions in chunks before. It is one that it ends, or has all of it.
  __device__ bool continues(const SegmentSum& p) const {
    return segment < p.segments && first > 0 && __ldg(p.ids + first - 1) == segment;
  }
};

// The chunks of a call, each with room for two rows: what it has of the segment that it begins with and does not begin,
// and of the one that it does not end.
struct Chunks {
  int64_t items;
  int count;
  float* rows;
  int32_t* firsts;

  Chunks(const SegmentSum& p)
      : items(int64_t{p.positions} + p.segments),
        count(static_cast<int>((items + kChunk - 1) / kChunk)),
        rows(p.workspace.data),
        firsts(reinterpret_cast<int32_t*>(rows + 2 * count * p.cols)) {}

  __device__ float* head(const SegmentSum& p, int chunk) const { return rows + 2 * chunk * p.cols; }
  __device__ float* tail(const SegmentSum& p, int chunk) const { return rows + (2 * chunk + 1) * p.cols; }

  __device__ int64_t begin(int chunk) const { return min(int64_t{chunk} * kChunk, items); }

  // How many positions are among the first so many items.
  __device__ static int positions_before(const SegmentSum& p, int64_t item) {
    int low = static_cast<int>(max(int64_t{0}, item - p.segments));
    int high = static_cast<int>(min(item, int64_t{p.positions}));
    while (low < high) {
      const int middle = low + (high - low) / 2;
      const int id = min(max(__ldg(p.ids + middle), 0), p.segments);
      if (int64_t{middle} + id < item) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // Of ids that are not sorted it is something between these positions, and nothing beyond an array.
  __device__ Chunk between(int chunk, int first, int last) const {
    return {first, max(first, last), static_cast<int>(begin(chunk) - first),
            static_cast<int>(max(begin(chunk) - first, begin(chunk + 1) - last))};
  }

  __device__ int segment(int chunk) const { return static_cast<int>(begin(chunk) - firsts[chunk]); }

  // The chunk in which the segment began that ends in this one, after it continued: this one itself if there is none.
  __device__ int begin_of_last(const SegmentSum& p, int at) const {
    if (at == 0 || at >= count) return at;
    const int before = firsts[at - 1], first = firsts[at], own = segment(at);
    const int last = at + 1 < count ? firsts[at + 1] : p.positions;
    const Chunk chunk = between(at, first, last);
    if (chunk.end == own || !chunk.continues(p)) return at;
    if (static_cast<int>(begin(at - 1) - before) < own) return at - 1;
    int low = 0, high = at - 1;
    while (low < high) {
      const int middle = (low + high) / 2 + 1;
      if (segment(middle) < own || (segment(middle) == own && !between(middle, firsts[middle], at).continues(p))) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

// A thread has N neighbouring columns of a chunk.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) segment_sum_kernel(SegmentSum p, Chunks chunks) {
  __shared__ int firsts[kThreads + 1];
  const int64_t vectors = p.cols / N, thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int block = static_cast<int>(int64_t{blockIdx.x} * kThreads / vectors);  // the first chunk of this block
  const int at = static_cast<int>(thread / vectors), own = at - block;
  const int64_t col = thread % vectors * N;
  // Where the chunks of the block begin, and the last one ends.
  const int count = static_cast<int>((int64_t{blockIdx.x} * kThreads + kThreads - 1) / vectors) - block + 2;
  for (int i = threadIdx.x; i < count; i += kThreads) firsts[i] = Chunks::positions_before(p, chunks.begin(block + i));
  __syncthreads();
  if (at >= chunks.count) return;
  const Chunk chunk = chunks.between(at, firsts[own], firsts[own + 1]);
  if (col == 0) chunks.firsts[at] = chunk.first;

  bool continues = chunk.continues(p);
  int segment = chunk.segment;
  float sum[N] = {};
  const auto end_segment = [&] {
    if (continues) {
      store<true>(chunks.head(p, at) + col, pack<float>(sum), N);
    } else {
      store_floats(p.sums, segment * p.cols + col, sum);
    }
    continues = false;
    ++segment;
#pragma unroll
    for (float& value : sum) value = 0;
  };
  for (int begin = chunk.first; begin < chunk.last; begin += kAhead) {
    Packed<T, N> rows[kAhead];
    int ids[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int position = begin + i;
      ids[i] = position < chunk.last ? __ldg(p.ids + position) : -1;
      const bool counts = ids[i] >= 0 && ids[i] < p.segments;
      const int64_t row = counts && p.order ? __ldg(p.order + position) : position;
      rows[i] = load<true, N>(static_cast<const T*>(p.data.data) + row * p.cols + col, counts ? N : 0);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      for (const int id = min(ids[i], chunk.end); segment < id;) end_segment();
      float row[N];
      unpack(rows[i], row);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += row[k];
    }
  }
  while (segment < chunk.end) end_segment();
  if (chunk.last > chunk.first && segment < p.segments && __ldg(p.ids + chunk.last - 1) == segment)
    store<true>(chunks.tail(p, at) + col, pack<float>(sum), N);
}

// What chunks [begin, end) have of a segment, every `step`-th of them.
template <int N>
__device__ void add_tails(const SegmentSum& p, const Chunks& chunks, int begin, int end, int step, int64_t col,
                          float (&sum)[N]) {
  for (int at = begin; at < end; at += kTailsAhead * step) {
    Packed<float, N> tails[kTailsAhead];
#pragma unroll
    for (int i = 0; i < kTailsAhead; ++i) {
      const int chunk = at + i * step;
      tails[i] = load<true, N>(chunks.tail(p, min(chunk, end - 1)) + col, chunk < end ? N : 0);
    }
#pragma unroll
    for (int i = 0; i < kTailsAhead; ++i) {
      float tail[N];
      unpack(tails[i], tail);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += tail[k];
    }
  }
}

// Adds up the segments that end in a chunk and began in one before: each a warp's, or all of a block's if it is long.
template <int N>
__global__ void __launch_bounds__(kMergeWarps* kWarp) segment_merge_kernel(SegmentSum p, Chunks chunks) {
  __shared__ int begins[kMergeWarps];
  __shared__ float parts[kMergeWarps][kWarp * N];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, block = blockIdx.x * kMergeWarps;
  const int64_t col = (int64_t{blockIdx.y} * kWarp + lane) * N;
  const int there = col < p.cols ? N : 0;
  if (threadIdx.x < kMergeWarps) begins[threadIdx.x] = chunks.begin_of_last(p, block + threadIdx.x);
  __syncthreads();

  // Those of some warps' chunks, and then what the last chunk has.
  const auto write = [&](int at, Packed<float, N> packed, const float (&sum)[N]) {
    float last[N];
    unpack(packed, last);
#pragma unroll
    for (int k = 0; k < N; ++k) last[k] = sum[k] + last[k];
    if (there) store_floats(p.sums, chunks.segment(at) * p.cols + col, last);
  };
  const int own = block + warp, begin = begins[warp];
  if (begin < own && own - begin <= kFewChunks) {
    const auto last = load<true, N>(chunks.head(p, own) + col, there);
    float sum[N] = {};
    if (there) add_tails(p, chunks, begin, own, 1, col, sum);
    write(own, last, sum);
  }
  for (int i = 0; i < kMergeWarps; ++i) {
    const int at = block + i;
    if (at - begins[i] <= kFewChunks) continue;
    const auto last = load<true, N>(chunks.head(p, at) + col, there);
    float sum[N] = {};
    if (there) add_tails(p, chunks, begins[i] + warp, at, kMergeWarps, col, sum);
    store_shared(parts[warp] + lane * N, sum);
    __syncthreads();
    if (warp == 0) {
      for (int other = 1; other < kMergeWarps; ++other)
#pragma unroll
        for (int k = 0; k < N; ++k) sum[k] += parts[other][lane * N + k];
      write(at, last, sum);
    }
    __syncthreads();
  }
}

template <typename T, int N>
cudaError_t launch(const SegmentSum& p, const Chunks& chunks, cudaStream_t stream) {
  const int64_t blocks = (chunks.count * (p.cols / N) + kThreads - 1) / kThreads;
  const int64_t tiles = (p.cols / N + kWarp - 1) / kWarp;
  if (blocks > INT_MAX || tiles > USHRT_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks));
  if (const cudaError_t error = launch_grid(segment_sum_kernel<T, N>, grid, kThreads, stream, p, chunks)) return error;
  const dim3 merge((chunks.count + kMergeWarps - 1) / kMergeWarps, static_cast<unsigned>(tiles));
  return launch_grid(segment_merge_kernel<N>, merge, kMergeWarps * kWarp, stream, p, chunks);
}

template <typename T>
cudaError_t launch(const SegmentSum& p, const Chunks& chunks, cudaStream_t stream) {
  constexpr int N = 4;  // more would leave gaps between the stores of a warp
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.data, p.sums);
  return is_aligned ? launch<T, N>(p, chunks, stream) : launch<T, 1>(p, chunks, stream);
}

}  // namespace

WorkspaceSize segment_sum_workspace(const WorkspaceQuery& query) {
  const int64_t floats = 2 * query.cols + 1;  // of a chunk
  return {(floats + kChunk - 1) / kChunk, floats};
}

Outcome run(const SegmentSum& p, Stream stream) {
  const Chunks chunks(p);
  if (p.segments == 0 || p.cols == 0) return {cudaSuccess};
  if (p.workspace.floats < chunks.count * (2 * p.cols + 1)) return {cudaErrorMemoryAllocation};
  if (p.data.dtype == Dtype::f32) return {launch<float>(p, chunks, stream)};
  return {p.data.dtype == Dtype::f16 ? launch<__half>(p, chunks, stream) : launch<__nv_bfloat16>(p, chunks, stream)};
}

}  // namespace jaxnorm::cuda
