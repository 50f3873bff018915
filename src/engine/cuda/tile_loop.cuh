// A loop over tiles of rows, for results that follow from an element, numbers of its column, and numbers of its row
// that are known before. A thread has its columns' in registers, and goes down the rows of its tile. An op is a class
// with
//
//   Params, X, Y             what its kernel knows of a call, rows and cols among it; types of elements
//   from(p), to(p)           the two arrays; they may be one
//   Op(p, col, remaining)    what a thread has for its columns
//   Row, fetch(p, row)       numbers of a row
//   apply(p, row, values)    from elements of a row, results in their place
//   ALIGNED                  whether its columns are whole vectors, aligned in every array
#pragma once

#include "engine/cuda/launch.cuh"

namespace jaxnorm::cuda {

constexpr int kTileThreads = 256, kTileRows = 4;  // rows: of a thread, on their way at once

// Columns of a thread.
template <typename X, typename Y>
constexpr int kUnit = min_of(kVector<X>, kVector<Y>);

// A block has a tile: columns as far as threadIdx.x goes, and `rows` rows. `count` tiles side by side cover a row.
struct Tiles {
  int count, rows;
};

template <typename Op>
__global__ void __launch_bounds__(kTileThreads, 4)
    tile_kernel(const __grid_constant__ typename Op::Params p, const __grid_constant__ Tiles tiles) {
  using X = typename Op::X;
  using Y = typename Op::Y;
  constexpr int N = kUnit<X, Y>;
  const int block = blockIdx.x;
  const int64_t col = (int64_t{block % tiles.count} * blockDim.x + threadIdx.x) * N;
  if (col >= p.cols) return;
  const int remaining = Op::ALIGNED ? N : static_cast<int>(min(int64_t{N}, p.cols - col));
  const Op op(p, col, remaining);

  const int64_t begin = int64_t{block / tiles.count} * tiles.rows;
  const int rows = static_cast<int>(min(int64_t{tiles.rows}, p.rows - begin)), step = blockDim.y;
  const X* const from = static_cast<const X*>(Op::from(p).data) + begin * p.cols + col;
  Y* const to = static_cast<Y*>(Op::to(p).data) + begin * p.cols + col;
#pragma unroll 1
  for (int row = threadIdx.y; row < rows; row += kTileRows * step) {
    Packed<X, N> x[kTileRows];
    typename Op::Row numbers[kTileRows];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      const int at = min(row + r * step, rows - 1);
      x[r] = load<Op::ALIGNED, N>(from + at * p.cols, remaining);
      numbers[r] = op.fetch(p, begin + at);
    }
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      const int at = row + r * step;
      if (at >= rows) break;
      float values[N];
      unpack(x[r], values);
      op.apply(p, numbers[r], values);
      store<Op::ALIGNED>(to + at * p.cols, pack<Y>(values), remaining);
    }
  }
}

template <typename Op>
cudaError_t launch_tiles(const typename Op::Params& p, cudaStream_t stream) {
  constexpr int N = kUnit<typename Op::X, typename Op::Y>;
  const int64_t vectors = ceil_div(p.cols, N), count = ceil_div(vectors, kTileThreads);
  // Tiles begin on whole warps. Of rows that fit a block the next follows in memory as it does in the block.
  const int width = static_cast<int>(count == 1 ? vectors : ceil_div(ceil_div(vectors, count), kWarp) * kWarp);
  const int height = kTileThreads / width;
  // Tiles so small that there are blocks for every multiprocessor, and so large that what is of columns is read now and
  // then.
  constexpr int64_t blocks_wanted = 4096, most = 8;
  const int64_t heights = std::clamp<int64_t>(p.rows / (kTileRows * height) * count / blocks_wanted, 1, most);
  const Tiles tiles{static_cast<int>(count), static_cast<int>(heights) * kTileRows * height};
  const int64_t blocks = ceil_div(p.rows, tiles.rows) * count;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;  // more than memory has rows for
  return launch_grid(tile_kernel<Op>, dim3(static_cast<unsigned>(blocks)), dim3(width, height), stream, p, tiles);
}

}  // namespace jaxnorm::cuda
