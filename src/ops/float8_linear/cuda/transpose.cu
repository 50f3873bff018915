// Transposes bytes, in tiles that go through shared memory.
#include "engine/cuda/launch.cuh"
#include "ops/float8_linear/call.h"

namespace jaxnorm::cuda {
namespace {

// A tile is square. A thread takes vectors of four neighbouring rows, of which it makes words of four bytes of a
// column.
constexpr int kThreads = 256, kTile = 128, kVectorBytes = 16, kVectors = kTile / kVectorBytes;
constexpr int kWords = kTile / 4, kPitch = kWords + 1;
static_assert(kThreads == kVectors * kWords);

// The words of four columns from those of four rows, byte by byte.
__device__ void transpose_words(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t first_low = __byte_perm(rows[0], rows[1], 0x5140), first_high = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t last_low = __byte_perm(rows[2], rows[3], 0x5140), last_high = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(first_low, last_low, 0x5410), columns[1] = __byte_perm(first_low, last_low, 0x7632);
  columns[2] = __byte_perm(first_high, last_high, 0x5410), columns[3] = __byte_perm(first_high, last_high, 0x7632);
}

template <bool ALIGNED>
__global__ void __launch_bounds__(kThreads) transpose_kernel(TransposeBytes p) {
  __shared__ uint32_t tile[kTile * kPitch];
  const int64_t across = (p.cols + kTile - 1) / kTile;
  const int64_t first_col = blockIdx.x % across * kTile, first_row = blockIdx.x / across * kTile;
  const int at = threadIdx.x % kVectors * kVectorBytes, word = threadIdx.x / kVectors;
  const int there = static_cast<int>(max(int64_t{0}, min(int64_t{kVectorBytes}, p.cols - first_col - at)));
  Packed<uint8_t, kVectorBytes> x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t row = first_row + word * 4 + i;
    x[i] = load<ALIGNED, kVectorBytes>(p.x + row * p.cols + first_col + at, row < p.rows ? there : 0);
  }
#pragma unroll
  for (int k = 0; k < kVectorBytes / 4; ++k) {
    uint32_t columns[4];
    transpose_words({x[0].word[k], x[1].word[k], x[2].word[k], x[3].word[k]}, columns);
#pragma unroll
    for (int i = 0; i < 4; ++i) tile[(at + 4 * k + i) * kPitch + word] = columns[i];
  }
  __syncthreads();

  const bool is_aligned = p.rows % kVectorBytes == 0 && reinterpret_cast<uintptr_t>(p.y) % kVectorBytes == 0;
  const int run = threadIdx.x % kVectors * kVectorBytes;
  const int64_t remaining = p.rows - first_row - run;
  if (remaining <= 0) return;
  for (int col = threadIdx.x / kVectors; col < kTile && first_col + col < p.cols; col += kThreads / kVectors) {
    Packed<uint8_t, kVectorBytes> bytes;
#pragma unroll
    for (int k = 0; k < kVectorBytes / 4; ++k) bytes.word[k] = tile[col * kPitch + run / 4 + k];
    uint8_t* const to = p.y + (first_col + col) * p.rows + first_row + run;
    if (is_aligned) {
      store<true>(to, bytes, kVectorBytes);
    } else {
      store<false>(to, bytes, static_cast<int>(min(int64_t{kVectorBytes}, remaining)));
    }
  }
}

}  // namespace

Outcome run(const TransposeBytes& p, Stream stream) {
  const int64_t tiles = ((p.cols + kTile - 1) / kTile) * ((p.rows + kTile - 1) / kTile);
  if (tiles > INT_MAX) return {cudaErrorInvalidConfiguration};
  if (tiles == 0) return {cudaSuccess};
  const bool is_aligned = p.cols % kVectorBytes == 0 && reinterpret_cast<uintptr_t>(p.x) % kVectorBytes == 0;
  const auto kernel = is_aligned ? transpose_kernel<true> : transpose_kernel<false>;
  return {launch_grid(kernel, dim3(static_cast<unsigned>(tiles)), dim3(kThreads), stream, p)};
}

}  // namespace jaxnorm::cuda
