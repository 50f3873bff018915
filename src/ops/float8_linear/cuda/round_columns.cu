// Columns rounded to float8, as they lie and transposed, and read once: a cluster has a strip of columns, and each of
// its blocks some of their rows in shared memory, between the largest magnitudes, which the blocks exchange, and the
// values. Of more rows than a cluster holds one kernel finds the largest magnitudes and another one rounds.
#include "engine/cuda/device.h"
#include "ops/float8_linear/cuda/rounding.cuh"

namespace jaxnorm::cuda {

constexpr int kStripBytes = 64 << 10;  // of a block, so that a multiprocessor has room for three
constexpr int kRowsOfRun = 16;         // of a column, which a thread stores at once

// Narrow columns of float32 are stored as 16 bytes a row: a block may rather have twice kStripBytes.
template <typename X>
constexpr int kMostStripBytes = sizeof(X) == 4 ? 2 * kStripBytes : kStripBytes;

template <typename X>
constexpr int kStripThreads = 128 * sizeof(X);

struct ColumnRounding {
  const void* x;
  int64_t rows, cols;
  Quantization quantized;
  uint8_t *values, *transposed;  // values may be absent
  int block_rows;                // a multiple of kRowsOfRun
  int blocks;                    // of a strip
};

// The rows of a strip that a block has, each of so many words of four bytes: one column or two.
template <typename X, int WORDS>
struct Strip {
  static constexpr int kOfWord = 4 / sizeof(X), kCols = WORDS * kOfWord, N = kVector<X>;
  static constexpr int kVectors = kCols / N, kThreads = kStripThreads<X>, kGroups = kThreads / WORDS;

  const ColumnRounding& p;
  X* const tile;
  const int64_t first_col, first_row;
  const int rows;

  __device__ Strip(const ColumnRounding& p, int block)
      : p(p),
        tile(reinterpret_cast<X*>(dynamic_shared())),
        first_col(int64_t{blockIdx.x / p.blocks} * kCols),
        first_row(int64_t{block} * p.block_rows),
        rows(static_cast<int>(max(int64_t{0}, min(int64_t{p.block_rows}, p.rows - first_row)))) {}

  template <bool ALIGNED>
  __device__ void load() const {
    const X* const from = static_cast<const X*>(p.x) + first_row * p.cols + first_col;
    if constexpr (ALIGNED) {
      const int at = threadIdx.x % kVectors * N;
      for (int row = threadIdx.x / kVectors; row < rows; row += kThreads / kVectors)
        copy_or_clear<16>(reinterpret_cast<char*>(tile + row * kCols + at), from + row * p.cols + at,
                          first_col + at < p.cols);
      wait_for_copies();
    } else {
      for (int i = threadIdx.x; i < rows * kCols; i += kThreads)
        tile[i] = first_col + i % kCols < p.cols ? from[i / kCols * p.cols + i % kCols] : X{};
    }
    __syncthreads();
  }

  __device__ void get(int row, int word, float (&v)[kOfWord]) const {
    unpack(load_shared<kOfWord>(tile + row * kCols + word * kOfWord), v);
  }

  // Of the block's rows of column `threadIdx.x`, for as many threads as there are columns.
  __device__ float largest(float (&of_groups)[kGroups][kCols]) const {
    const int word = threadIdx.x % WORDS, group = threadIdx.x / WORDS;
    float largest[kOfWord] = {};
#pragma unroll 8
    for (int row = group; row < rows; row += kGroups) {
      float v[kOfWord];
      get(row, word, v);
#pragma unroll
      for (int k = 0; k < kOfWord; ++k) largest[k] = larger_magnitude(largest[k], v[k]);
    }
#pragma unroll
    for (int k = 0; k < kOfWord; ++k) of_groups[group][word * kOfWord + k] = largest[k];
    __syncthreads();
    float amax = 0.0f;
    if (threadIdx.x < kCols)
      for (int i = 0; i < kGroups; ++i) amax = larger_magnitude(amax, of_groups[i][threadIdx.x]);
    return amax;
  }

  __device__ void write_transposed(const float (&reciprocals)[kCols]) const {
    const int word = threadIdx.x % WORDS;
    const bool is_aligned = p.rows % kRowsOfRun == 0 && reinterpret_cast<uintptr_t>(p.transposed) % kRowsOfRun == 0;
    for (int row = threadIdx.x / WORDS * kRowsOfRun; row < rows; row += kGroups * kRowsOfRun) {
      float v[kOfWord][kRowsOfRun];
#pragma unroll
      for (int i = 0; i < kRowsOfRun; ++i) {
        float of_row[kOfWord] = {};
        if (row + i < rows) get(row + i, word, of_row);
#pragma unroll
        for (int k = 0; k < kOfWord; ++k) v[k][i] = of_row[k] * reciprocals[word * kOfWord + k];
      }
#pragma unroll
      for (int k = 0; k < kOfWord; ++k) {
        const int64_t column = first_col + word * kOfWord + k;
        if (column >= p.cols) continue;
        uint8_t* const to = p.transposed + column * p.rows + first_row + row;
        const auto packed = pack_quantized<Dtype::f8e4m3fn>(v[k]);
        if (is_aligned) {
          store<true>(to, packed, kRowsOfRun);
        } else {
          store<false>(to, packed, rows - row);
        }
      }
    }
  }

  template <bool ALIGNED>
  __device__ void write_values(const float (&reciprocals)[kCols]) const {
    const int at = threadIdx.x % kVectors * N;
    const int there = static_cast<int>(max(int64_t{0}, min(int64_t{N}, p.cols - first_col - at)));
    float by[N];
    unpack(load_shared<N>(reciprocals + at), by);
    for (int row = threadIdx.x / kVectors; row < rows; row += kThreads / kVectors) {
      float v[N];
      unpack(load_shared<N>(tile + row * kCols + at), v);
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] *= by[i];
      store<ALIGNED>(p.values + (first_row + row) * p.cols + first_col + at, pack_quantized<Dtype::f8e4m3fn>(v), there);
    }
  }
};

template <typename X, int WORDS, bool ALIGNED>
__global__ void __launch_bounds__(kStripThreads<X>) round_columns_kernel(const __grid_constant__ ColumnRounding p) {
  using S = Strip<X, WORDS>;
  __shared__ TransactionBarrier barrier;
  __shared__ float of_blocks[kMaxCluster][S::kCols], of_groups[S::kGroups][S::kCols];
  alignas(16) __shared__ float reciprocals[S::kCols];
  const int block = static_cast<int>(blockIdx.x % p.blocks);
  const bool exchanges = kHasClusters && p.blocks > 1;
  if (exchanges) {
    if (threadIdx.x == 0) {
      barrier.init();
      barrier.expect(p.blocks * S::kCols * static_cast<int>(sizeof(float)));
    }
    Cluster::arrive();
  }
  const S strip(p, block);
  strip.template load<ALIGNED>();
  float amax = strip.largest(of_groups);
  if (exchanges) {
    Cluster::wait();  // until all blocks' barriers are there
    if (threadIdx.x < S::kCols)
      for (int to = 0; to < p.blocks; ++to) barrier.send<1>(&of_blocks[block][threadIdx.x], {amax}, to);
    barrier.wait(0);
    if (threadIdx.x < S::kCols)
      for (int from = 0; from < p.blocks; ++from) amax = larger_magnitude(amax, of_blocks[from][threadIdx.x]);
  }
  if (threadIdx.x < S::kCols) {
    const float scale = scale_of(p.quantized, amax);
    const int64_t column = strip.first_col + threadIdx.x;
    if (block == 0 && column < p.cols) p.quantized.scales[column] = amax == 0.0f ? p.quantized.of_zeros : scale;
    reciprocals[threadIdx.x] = 1.0f / scale;
  }
  __syncthreads();
  strip.write_transposed(reciprocals);
  if (p.values) strip.template write_values<ALIGNED>(reciprocals);
}

// Nothing where a cluster does not hold a strip.
template <typename X, int WORDS, bool ALIGNED>
bool launch_strips(ColumnRounding p, int most_bytes, cudaStream_t stream, cudaError_t& error) {
  constexpr int kRowBytes = WORDS * 4;
  const Device& device = current_device();
  const auto rows_of = [&](int64_t blocks) {
    return ((p.rows + blocks - 1) / blocks + kRowsOfRun - 1) / kRowsOfRun * kRowsOfRun;
  };
  Plan plan{};
  plan.threads_per_row = kStripThreads<X>, plan.rows_per_block = 1, plan.blocks_per_row = 1;
  while (plan.blocks_per_row < device.max_cluster() && rows_of(plan.blocks_per_row) * kRowBytes > kStripBytes)
    plan.blocks_per_row *= 2;
  p.blocks = plan.blocks_per_row;
  const int64_t rows = rows_of(p.blocks);
  if (rows * kRowBytes > std::min(most_bytes, device.shared_bytes - 2 * kOwnBytes)) return false;
  p.block_rows = static_cast<int>(rows);
  const int64_t strips = (p.cols + Strip<X, WORDS>::kCols - 1) / Strip<X, WORDS>::kCols;
  error = launch_groups(round_columns_kernel<X, WORDS, ALIGNED>, plan, strips, p.block_rows * kRowBytes, stream, p);
  return true;
}

template <typename X, bool ALIGNED>
bool launch_strips(const ColumnRounding& p, cudaStream_t stream, cudaError_t& error) {
  return launch_strips<X, 32, ALIGNED>(p, kMostStripBytes<X>, stream, error) ||
         launch_strips<X, 16, ALIGNED>(p, INT_MAX, stream, error);
}

template <typename X>
cudaError_t run_round_columns(const RoundColumns& p, cudaStream_t stream) {
  const bool is_aligned = p.cols % kVector<X> == 0 && are_aligned<kVector<X>>(p.x, p.values);
  const Quantization quantized = to_float8(p, p.transposed, p.scales);
  auto* const values = static_cast<uint8_t*>(p.values.data);
  auto* const transposed = static_cast<uint8_t*>(p.transposed.data);
  const ColumnRounding strips{p.x.data, p.rows, p.cols, quantized, values, transposed, 0, 0};
  cudaError_t error = cudaSuccess;
  if (is_aligned ? launch_strips<X, true>(strips, stream, error) : launch_strips<X, false>(strips, stream, error))
    return error;

  if (p.workspace.floats < p.cols) return cudaErrorMemoryAllocation;
  const ColumnsOf columns{p.x.data, p.rows, p.cols, {p.workspace.data, nullptr}};
  error = cudaMemsetAsync(p.workspace.data, 0, p.cols * sizeof(float), stream);
  if (error == cudaSuccess) error = largest_of_columns<X>(columns, stream);
  return error != cudaSuccess ? error : round_tiles<X>({columns, quantized, values, transposed}, stream);
}

Outcome run(const RoundColumns& p, Stream stream) {
  return {with_dtype(p.x.dtype, [&](auto x) { return run_round_columns<decltype(x)>(p, stream); })};
}

WorkspaceSize round_columns_workspace(const WorkspaceQuery& query) { return {0, query.cols}; }

}  // namespace jaxnorm::cuda
