// Sums of segments, whose positions are sorted.
//
// Positions and segments are merged to one list, in which a segment stands behind its positions: a position is read and
// added, a segment is written. Chunks of this list are equally long whatever the ids are, so that a segment without
// positions and one with most of them cost what they read and write. Of sums that are added to what is there the list
// has positions alone. A chunk goes on to the end of its last segment where that is near; a longer one is shared by
// chunks, and added up by a second kernel, in their order.
#include <climits>

#include "engine/cuda/device.h"
#include "engine/cuda/launch.cuh"
#include "ops/segment_sum/call.h"

namespace jaxnorm::cuda {
namespace {

constexpr int kChunk = 64, kThreads = 128;  // items of the list; threads of a block
constexpr int kNear = kChunk / 2;           // how many positions beyond its items a chunk takes at most
constexpr int kAhead = 4;                   // how many rows a thread has asked for at once
// Of the second kernel: the warps of a block; how many chunks it looks at, and at most; how many of a segment one warp
// adds up, and how many it has asked for at once; and how many blocks run at once, since most find nothing to do.
constexpr int kMergeWarps = 16, kLooks = 16, kMostLooks = 128, kFewChunks = 16, kTailsAhead = 8, kMergeBlocks = 768;

// A place in the list: so many positions and segments stand before it.
struct Place {
  int position, segment;

  // Whether positions of its segment stand before it.
  __device__ bool divides(const SegmentSum& p) const {
    return segment >= 0 && segment < p.segments && position > 0 && __ldg(p.ids + position - 1) == segment;
  }
};

// What the second kernel knows of a chunk: the segment at its beginning, and the chunk in which that one begins.
struct Start {
  int chunk, segment;
};

// The chunks of a call, each with room for two rows: what it has of the segment that it begins with and does not begin,
// and of the one that it does not end.
struct Chunks {
  int64_t items;
  int count;
  float* rows;
  Start* starts;

  Chunks(const SegmentSum& p)
      : items(int64_t{p.positions} + (p.is_added ? 0 : p.segments)),
        count(static_cast<int>((items + kChunk - 1) / kChunk)),
        rows(p.workspace.data),
        starts(reinterpret_cast<Start*>(rows + 2 * count * p.cols)) {}

  __device__ float* head(const SegmentSum& p, int chunk) const { return rows + 2 * chunk * p.cols; }
  __device__ float* tail(const SegmentSum& p, int chunk) const { return rows + (2 * chunk + 1) * p.cols; }

  // The first of [low, high) that is not before, or high. A warp asks for as many places at once.
  template <int LANES, typename IsBefore>
  __device__ static int search(int low, int high, IsBefore is_before) {
    while (low < high) {
      const int64_t step = (high - low) / (LANES == 1 ? 2 : LANES) + 1;
      if constexpr (LANES == 1) {
        const int at = static_cast<int>(low + step - 1);
        if (is_before(at)) {
          low = at + 1;
        } else {
          high = at;
        }
      } else {
        const int64_t at = low + (threadIdx.x % kWarp + 1) * step - 1;
        const int before = __popc(__ballot_sync(0xffffffffu, at < high && is_before(static_cast<int>(at))));
        high = static_cast<int>(min(int64_t{high}, low + (before + 1) * step - 1));
        low = static_cast<int>(low + before * step);
      }
    }
    return low;
  }

  // The segment of a position: -1 before all, and behind the last position that behind all.
  __device__ static int segment_of(const SegmentSum& p, int position) {
    return position < p.positions ? min(max(__ldg(p.ids + position), -1), p.segments) : p.segments;
  }

  // Where a chunk begins: asked by one thread, or by a warp. Of ids that are not sorted it is some place in the list.
  template <int LANES>
  __device__ Place place(const SegmentSum& p, int chunk) const {
    const int64_t item = min(int64_t{chunk} * kChunk, items);
    const int position = p.is_added
                             ? static_cast<int>(item)
                             : search<LANES>(static_cast<int>(max(int64_t{0}, item - p.segments)),
                                             static_cast<int>(min(item, int64_t{p.positions})),
                                             [&](int at) { return int64_t{at} + max(segment_of(p, at), 0) < item; });
    const int segment = p.is_added ? segment_of(p, position) : static_cast<int>(item - position);
    const int near = min(position + kNear, p.positions);
    const Place exact{position, segment};
    if (!exact.divides(p) || (near < p.positions && __ldg(p.ids + near) == segment)) return exact;
    const int end = search<LANES>(position, near, [&](int at) { return __ldg(p.ids + at) == segment; });
    return {end, p.is_added ? segment_of(p, end) : segment + 1};
  }

  // The start of a chunk that begins at this place.
  template <int LANES>
  __device__ Start start(const SegmentSum& p, int chunk, Place place) const {
    if (!place.divides(p)) return {chunk, place.segment};
    const int first = search<LANES>(0, place.position, [&](int at) { return __ldg(p.ids + at) < place.segment; });
    return {static_cast<int>((int64_t{first} + (p.is_added ? 0 : place.segment)) / kChunk), place.segment};
  }

  // The chunk in which the segment begins that ends in this one: this one where there is none but its own.
  __device__ int begin_of(const SegmentSum& p, int chunk) const {
    if (chunk >= count) return chunk;
    const int end = chunk + 1 < count ? starts[chunk + 1].segment : p.segments;
    return end > starts[chunk].segment ? starts[chunk].chunk : chunk;
  }
};

// Writes the sum of a segment, of N neighbouring columns, or adds it to what is there.
template <int N>
__device__ void store_sum(const SegmentSum& p, int segment, int64_t col, float (&sum)[N]) {
  if (segment < 0) return;
  if (p.is_added) {
    float onto[N];
    load_floats<true>({p.sums.data, p.sums.dtype}, segment * p.cols + col, N, onto);
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] = onto[k] + sum[k];
  }
  store_floats(p.sums, segment * p.cols + col, sum);
}

// A thread has N neighbouring columns of a chunk.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) segment_sum_kernel(SegmentSum p, Chunks chunks) {
  __shared__ Place places[kThreads + 1];
  const int64_t vectors = p.cols / N, first_thread = int64_t{blockIdx.x} * kThreads;
  const int block = static_cast<int>(first_thread / vectors);  // the first chunk of this block
  const int at = static_cast<int>((first_thread + threadIdx.x) / vectors);
  const int64_t col = (first_thread + threadIdx.x) % vectors * N;
  // Where the chunks of the block begin, and the last one ends. That of two blocks has the same start from both.
  const int last = static_cast<int>((first_thread + kThreads - 1) / vectors) + 1;
  const int count = last - block + 1, warp = threadIdx.x / kWarp;
  const auto begin_at = [&](auto lanes, int i) {
    constexpr int LANES = decltype(lanes)::value;
    const Place place = chunks.place<LANES>(p, block + i);
    const Start start = chunks.start<LANES>(p, block + i, place);
    if (threadIdx.x % LANES != 0) return;
    places[i] = place;
    if (block + i < chunks.count) chunks.starts[block + i] = start;
  };
  if (count <= 2 * kThreads / kWarp) {
    for (int i = warp; i < count; i += kThreads / kWarp) begin_at(std::integral_constant<int, kWarp>{}, i);
  } else {
    for (int i = threadIdx.x; i < count; i += kThreads) begin_at(std::integral_constant<int, 1>{}, i);
  }
  __syncthreads();
  if (at >= chunks.count) return;
  const Place begin = places[at - block], end{max(begin.position, places[at - block + 1].position),
                                              max(begin.segment, places[at - block + 1].segment)};

  bool continues = begin.divides(p);
  int segment = begin.segment;
  float sum[N] = {};
  // Ends the segment and, unless sums are added, those without positions between it and `next`.
  const auto go_to = [&](int next) {
    while (segment < next) {
      if (continues) {
        store<true>(chunks.head(p, at) + col, pack<float>(sum), N);
      } else {
        store_sum(p, segment, col, sum);
      }
      continues = false;
      segment = p.is_added ? next : segment + 1;
#pragma unroll
      for (float& value : sum) value = 0;
    }
  };
  for (int first = begin.position; first < end.position; first += kAhead) {
    Packed<T, N> rows[kAhead];
    int ids[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int position = first + i;
      ids[i] = position < end.position ? __ldg(p.ids + position) : -1;
      const bool counts = ids[i] >= 0 && ids[i] < p.segments;
      const int64_t row = counts && p.order ? __ldg(p.order + position) : position;
      rows[i] = load<true, N>(static_cast<const T*>(p.data.data) + row * p.cols + col, counts ? N : 0);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      go_to(min(ids[i], end.segment));
      float row[N];
      unpack(rows[i], row);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += row[k];
    }
  }
  go_to(end.segment);
  if (end.position > begin.position && end.divides(p)) store<true>(chunks.tail(p, at) + col, pack<float>(sum), N);
}

// N floats, at this place among other such loads.
template <int N>
__device__ void load_tail(const float* from, float (&to)[N]) {
  if constexpr (N == 1) {
    cuda::load_now(reinterpret_cast<uint32_t&>(to[0]), reinterpret_cast<const uint32_t*>(from));
  } else {
    unpack(cuda::load_now<N>(from, N), to);
  }
}

// What chunks [begin, end) have of a segment, every `step`-th of them.
template <int N>
__device__ void add_tails(const SegmentSum& p, const Chunks& chunks, int begin, int end, int step, int64_t col,
                          float (&sum)[N]) {
  for (int at = begin; at < end; at += kTailsAhead * step) {
    float tails[kTailsAhead][N];
#pragma unroll
    for (int i = 0; i < kTailsAhead; ++i) load_tail(chunks.tail(p, min(at + i * step, end - 1)) + col, tails[i]);
#pragma unroll
    for (int i = 0; i < kTailsAhead; ++i)
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += at + i * step < end ? tails[i][k] : 0.0f;
  }
}

// Adds up the segments that end in a chunk and began in one before: each a warp's, or all of a block's if it is long. A
// block has so many chunks, and every gridDim.y-th tile of columns.
template <int N>
__global__ void __launch_bounds__(kMergeWarps* kWarp) segment_merge_kernel(SegmentSum p, Chunks chunks, int looks) {
  __shared__ int begins[kMostLooks];
  __shared__ float parts[kMergeWarps][kWarp * N];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, block = blockIdx.x * looks;
  for (int i = threadIdx.x; i < looks; i += kMergeWarps * kWarp) begins[i] = chunks.begin_of(p, block + i);
  __syncthreads();
  bool has_any = false;
  for (int i = lane; i < looks; i += kWarp) has_any |= begins[i] < block + i;
  if (!__ballot_sync(0xffffffffu, has_any)) return;

  for (int64_t first = int64_t{blockIdx.y} * kWarp * N; first < p.cols; first += int64_t{gridDim.y} * kWarp * N) {
    const int64_t col = first + lane * N;
    const int there = col < p.cols ? N : 0;
    // What some chunks have together, and the last one.
    const auto write = [&](int at, Packed<float, N> packed, const float (&sum)[N]) {
      float last[N];
      unpack(packed, last);
#pragma unroll
      for (int k = 0; k < N; ++k) last[k] = sum[k] + last[k];
      if (there) store_sum(p, chunks.starts[at].segment, col, last);
    };
    for (int i = warp; i < looks; i += kMergeWarps) {
      const int at = block + i;
      if (begins[i] == at || at - begins[i] > kFewChunks) continue;
      const auto last = load<true, N>(chunks.head(p, at) + col, there);
      float sum[N] = {};
      if (there) add_tails(p, chunks, begins[i], at, 1, col, sum);
      write(at, last, sum);
    }
    for (int i = 0; i < looks; ++i) {
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
}

template <typename T, int N>
cudaError_t launch(const SegmentSum& p, const Chunks& chunks, cudaStream_t stream) {
  const int64_t blocks = (chunks.count * (p.cols / N) + kThreads - 1) / kThreads;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks));
  if (const cudaError_t error = launch_grid(segment_sum_kernel<T, N>, grid, kThreads, stream, p, chunks)) return error;
  const int looks = kLooks * std::clamp(chunks.count / (kLooks * kMergeBlocks) + 1, 1, kMostLooks / kLooks);
  const int groups = (chunks.count + looks - 1) / looks;
  const int64_t tiles = (p.cols / N + kWarp - 1) / kWarp;
  const dim3 merge(groups, static_cast<unsigned>(std::min<int64_t>(tiles, std::max(1, kMergeBlocks / groups))));
  return launch_grid(segment_merge_kernel<N>, merge, kMergeWarps * kWarp, stream, p, chunks, looks);
}

template <typename T>
cudaError_t launch(const SegmentSum& p, const Chunks& chunks, cudaStream_t stream) {
  constexpr int N = 4;  // more would leave gaps between the stores of a warp
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.data, p.sums, Output{p.workspace.data, Dtype::f32});
  return is_aligned ? launch<T, N>(p, chunks, stream) : launch<T, 1>(p, chunks, stream);
}

}  // namespace

WorkspaceSize segment_sum_workspace(const WorkspaceQuery& query) {
  const int64_t floats = 2 * query.cols + 2;  // of a chunk
  return {(floats + kChunk - 1) / kChunk, floats};
}

Outcome run(const SegmentSum& p, Stream stream) {
  const Chunks chunks(p);
  if (p.segments == 0 || p.cols == 0) return {cudaSuccess};
  if (p.is_added && p.onto.data != p.sums.data) {
    const size_t bytes = p.segments * p.cols * size_of(p.sums.dtype);
    const cudaError_t error =
        cudaMemcpyAsync(p.sums.data, p.onto.data, bytes, cudaMemcpyDeviceToDevice, cudaStream_t{stream});
    if (error != cudaSuccess) return {error};
  }
  if (chunks.count == 0) return {cudaSuccess};
  if (p.workspace.floats < chunks.count * (2 * p.cols + 2)) return {cudaErrorMemoryAllocation};
  return {with_dtype(p.data.dtype, [&](auto x) { return launch<decltype(x)>(p, chunks, stream); })};
}

}  // namespace jaxnorm::cuda
