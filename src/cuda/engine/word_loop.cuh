// A loop over the 16-byte words of memory in which rows lie, for results that follow from an element, its column, and
// numbers of its row that are known before. A row begins and ends anywhere in a word. The words that it has as a whole
// are vectors, and what is left at both ends goes element by element, so that odd lengths are about as fast as others.
// An op is a class with
//
//   Params, T          what its kernel knows of a call, rows and cols among it; the type of the elements
//   from(p), to(p)     the arrays, which may be one: each element is written by the thread that reads it
//   Op(p, row, col)    what a thread has of a row, from a column on
//   read<N>(at)        what it reads of the N columns from the at-th after that one on
//   write<N>(p, at, what it read)
#pragma once

#include "cuda/engine/launch.cuh"
#include "cuda/engine/unaligned.cuh"

namespace jaxnorm::cuda {

constexpr int kWordThreads = 256, kWordBlocks = 4;  // of a block; of a multiprocessor
constexpr int kWordVectors = 4;                     // of a thread, on their way at once
constexpr int kLine = 128;                          // bytes

// Groups of 2^log_lanes threads have a tile of a row each, and `count` tiles side by side cover a row. Neighbouring
// groups have neighbouring tiles: what is under way at a time lies together in memory.
struct WordTiles {
  unsigned count;
  int log_lanes;
};

// N: elements of a vector; 1 where the two arrays lie in their words in different ways. WARPS: whether groups are
// warps. Then addresses have constants, and the tiles of a row that may begin anywhere are lines of memory.
template <typename Op, int N, bool WARPS>
__global__ void __launch_bounds__(kWordThreads, kWordBlocks)
    words_kernel(const __grid_constant__ typename Op::Params p, const __grid_constant__ WordTiles tiles) {
  const int log_lanes = WARPS ? 5 : tiles.log_lanes, lanes = 1 << log_lanes, lane = threadIdx.x & (lanes - 1);
  int64_t row = int64_t{blockIdx.x} * (kWordThreads >> log_lanes) + (threadIdx.x >> log_lanes);
  unsigned tile = 0;
  if (tiles.count > 1) {  // there are no more of these than an unsigned counts
    const auto index = static_cast<unsigned>(row);
    row = index / tiles.count;
    tile = index - static_cast<unsigned>(row) * tiles.count;
  }
  if (row >= p.rows) return;

  // Columns before the first whole word, whole words, and words of its line before it.
  int head = 0, before = 0;
  const auto* const begin = static_cast<const typename Op::T*>(Op::from(p).data) + row * p.cols;
  if constexpr (N > 1) head = -offset_in_word(begin) & (N - 1);
  if constexpr (WARPS) before = reinterpret_cast<uintptr_t>(begin + head) % kLine / 16;
  const auto words = static_cast<unsigned>(max(p.cols - head, int64_t{0}) / N);
  const int first = static_cast<int>(tile) * kWordVectors * lanes + lane - before;
  const int64_t col = head + int64_t{first} * N;
  const auto has = [&](int v) { return static_cast<unsigned>(first + v * lanes) < words; };

  const Op op(p, row, col);
  decltype(op.template read<N>(0)) vectors[kWordVectors];
#pragma unroll
  for (int v = 0; v < kWordVectors; ++v)
    if (has(v)) vectors[v] = op.template read<N>(v * lanes * N);
  if constexpr (N > 1) {
    // The ends: before the first whole word in the first tile, and after the last one in the last.
    const int i = tile == 0 ? lane : head + lane, end = tile == tiles.count - 1 ? head + N : head;
    const int64_t end_col = i < head ? i : i + int64_t{words} * N;
    if (i < end && end_col < p.cols) {
      const int at = static_cast<int>(end_col - col);
      op.template write<1>(p, at, op.template read<1>(at));
    }
  }
#pragma unroll
  for (int v = 0; v < kWordVectors; ++v)
    if (has(v)) op.template write<N>(p, v * lanes * N, vectors[v]);
}

template <typename Op, int N>
cudaError_t launch_words(const typename Op::Params& p, cudaStream_t stream) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t words = p.cols / N, row_bytes = p.cols * size_of(Op::from(p).dtype);
  const auto begin = reinterpret_cast<uintptr_t>(Op::from(p).data);
  // A group has a thread for each element of the ends.
  const int64_t ends = row_bytes % 16 != 0 || begin % 16 != 0 ? std::min<int64_t>(p.cols, 2 * N - 1) : 1;
  int log_lanes = 0;
  while (log_lanes < 5 && ((kWordVectors << log_lanes) < words || (1 << log_lanes) < ends)) ++log_lanes;
  const bool warps = N > 1 && log_lanes == 5, is_on_lines = row_bytes % kLine == 0 && begin % kLine == 0;
  const int64_t before = warps && !is_on_lines ? kLine / 16 - 1 : 0;
  const int64_t count = std::max<int64_t>(1, ceil_div(words + before, kWordVectors << log_lanes));
  const int64_t blocks = ceil_div(p.rows * count, kWordThreads >> log_lanes);
  if (words > INT_MAX - kWordVectors * kWarp || blocks > INT_MAX || (count > 1 && p.rows * count > UINT_MAX))
    return cudaErrorInvalidConfiguration;  // more than memory has room for
  return launch_grid(warps ? words_kernel<Op, N, (N > 1)> : words_kernel<Op, N, false>,
                     dim3(static_cast<unsigned>(blocks)), dim3(kWordThreads), stream, p,
                     WordTiles{static_cast<unsigned>(count), log_lanes});
}

// In vectors, where both arrays begin at the same place in a word.
template <typename Op>
cudaError_t launch_words(const typename Op::Params& p, cudaStream_t stream) {
  const auto place = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16; };
  return place(Op::from(p).data) == place(Op::to(p).data) ? launch_words<Op, kVector<typename Op::T>>(p, stream)
                                                          : launch_words<Op, 1>(p, stream);
}

}  // namespace jaxnorm::cuda
