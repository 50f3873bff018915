// From a plan to a kernel: the regimes as types, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <initializer_list>

#include "cuda/engine/device.h"
#include "cuda/engine/pipeline.cuh"
#include "cuda/engine/plan.h"
#include "cuda/engine/row_map.cuh"
#include "cuda/engine/vector.cuh"

namespace jaxnorm::cuda {

// What of a plan the compiler has to know. CLUSTER: the most blocks of a thread group; 1: no cluster. MOST: the most
// threads of a block.
template <int THREADS, int VECTORS, int CLUSTER, int MOST = kMaxThreads>
struct Regime {
  static constexpr int kThreads = THREADS, kVectors = VECTORS, kCluster = CLUSTER, kMost = MOST;
  // Whether a thread group may have more warps than are merged at once. Blocks of more vectors a thread have several
  // thread groups.
  static constexpr bool kManyWarps = VECTORS == 1 && (MOST > kMaxThreads);
  template <int ARRAYS = 1>
  static constexpr int kRows = rows_at_once(THREADS, VECTORS, ARRAYS);
};

// How many blocks of so many threads a multiprocessor holds, with so many registers each: a quarter of it has a quarter
// of the registers, and of the warps.
constexpr int resident_blocks(int registers, int threads) {
  return (16 << 10) / (registers * kWarp) * 4 * kWarp / threads;
}

// How a kernel reaches rows: in vectors, or, where those do not divide a row, in elements, unless it shifts. It makes
// no difference to the results which way it goes about either.
enum class Access : uint8_t {
  pipelined,    // aligned vectors, by way of shared memory
  vectors,      // aligned vectors
  elementwise,  // vectors, each read and written element by element
  unaligned,    // vectors, by way of the 16-byte words of memory in which they lie
  pipelined_scalar,
  scalar,
};

template <Access ACCESS>
using AccessAs = std::integral_constant<Access, ACCESS>;

// Whether every access of a vector may be one of up to 16 bytes. N: elements a vector.
template <int N>
bool aligned_for(Dtype dtype, const void* data) {
  return reinterpret_cast<uintptr_t>(data) % std::min(16, N * size_of(dtype)) == 0;
}

// An array of which pipelines hold rows: bytes of an element, and elements from a row to the next.
struct PipelineArray {
  int size;
  int64_t stride;
};

constexpr int kOwnBytes = 4 << 10;  // of shared memory, more than any kernel with pipelines declares

// A launch of a kernel that goes by rows.
struct RowsLaunch {
  int threads_per_row, rows_per_block;
  int64_t span;  // columns of each block of a cluster
  float reciprocal_cols;
  RowMapLaunch weight_rows;
  int64_t step = 0, end = 0;  // of thread groups that take turns, as of RowSchedule
  int64_t reach = 0;          // from the first turn to the last, as rows
  int sums = 1;               // of the backward, as of RowSchedule
  PipelineShape pipeline = {};
  uint32_t* tickets = nullptr;  // as of DynamicRows

  RowsLaunch(const Plan& plan, int64_t cols, int vector, const RowMap& weight_rows)
      : threads_per_row(plan.threads_per_row),
        rows_per_block(plan.rows_per_block),
        span(int64_t{plan.threads_per_row} * plan.vectors * vector),
        reciprocal_cols(1.0f / static_cast<float>(cols)),
        weight_rows(weight_rows) {
    // A looped row's blocks share it evenly, in whole vectors.
    if (plan.vectors == kStreamed)
      span = ((cols + vector - 1) / vector + plan.blocks_per_row - 1) / plan.blocks_per_row * vector;
  }

  void take_turns(int64_t rows_of_turn, int64_t rows) {
    step = rows_of_turn;
    end = rows;
    reach = rows > 0 ? (rows - 1) / step * step : 0;
  }

  // Of clusters with pipelines that draw what they have no room for at first, counting in `counter`.
  cudaError_t schedule_dynamically(int64_t clusters, int64_t rows, uint32_t* counter, cudaStream_t stream) {
    take_turns(clusters, rows);
    if (rows <= clusters * pipeline.stages) return cudaSuccess;
    if (!counter || rows > INT_MAX) return cudaErrorInvalidValue;
    tickets = counter;
    return cudaMemsetAsync(counter, 0, sizeof *counter, stream);
  }

  __device__ DynamicRows dynamic_rows(int64_t cluster) const {
    return {{end - step + cluster, -step, end, 1}, static_cast<int>(step) * pipeline.stages, tickets};
  }

  // Of a block that begins at row `first` of a turn, from the last turn to the first: of what was written just now the
  // cache still has the end, and whoever reads the result begins at its beginning.
  __device__ Rows backwards(int64_t first, int block_rows) const { return {first + reach, -step, end, block_rows}; }

  __device__ Rows forwards(int64_t first, int block_rows) const { return {first, step, end, block_rows}; }

  // Goes by way of pipelines, if the device has what it takes. `held`: rows that a thread group takes before it leaves
  // the first. Returns what the block needs of shared memory, with `besides` bytes after the pipelines; 0 if there are
  // none.
  int with_pipelines(const Plan& plan, int64_t cols, std::initializer_list<PipelineArray> arrays, int held,
                     int besides = 0) {
    const Device& device = current_device();
    const int rows = std::max(1, kWarp / plan.threads_per_row),
              pipelines = plan.rows_per_block / rows;  // rows: of a stage
    // Rows that vectors do not divide begin and end anywhere in 16-byte words of 16 bytes.
    const bool uneven =
        std::any_of(arrays.begin(), arrays.end(), [&](auto array) { return cols * array.size % 16 != 0; });
    int turn = 0, i = 0;
    for (const PipelineArray array : arrays) {
      if (array.stride > INT_MAX / array.size / rows) return 0;
      const int64_t bytes = ((rows - 1) * array.stride + std::min(cols, span)) * array.size + (uneven ? 32 : 0);
      if (bytes > device.shared_bytes) return 0;
      pipeline.bytes[i] = static_cast<int>((bytes + 127) / 128 * 128);
      pipeline.stride[i] = static_cast<int>(array.stride);
      turn += pipelines * pipeline.bytes[i++];
    }
    // Enough in flight to keep the memory busy. More would be slower: some multiprocessors would be served faster than
    // others, which has them finish early, and the further apart the rows are that they are at, the less of what they
    // ask for lies side by side.
    constexpr int in_flight = 64 << 10;
    const int wanted = std::max(plan.blocks_per_row > 2 ? 3 : 2, held + (in_flight + turn - 1) / turn);
    pipeline.stages = std::min({wanted, (device.shared_bytes - kOwnBytes - besides) / turn, kMaxStages / pipelines});
    if (!device.has_clusters() || pipeline.stages <= held) return 0;
    return pipeline.stages * turn + besides;
  }
};

template <typename... Params, typename... Args>
cudaError_t launch_grid(void (*kernel)(Params...), dim3 grid, dim3 block, cudaStream_t stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Launches `thread groups` blocks or clusters.
template <typename... Params, typename... Args>
cudaError_t launch_groups(void (*kernel)(Params...), const Plan& plan, int64_t thread_groups, int shared_bytes,
                          cudaStream_t stream, const Args&... args) {
  // More than this has to be allowed kernel by kernel. It is the kernel's for all threads of the process, so what is
  // allowed may not depend on the call: all that there is.
  constexpr int portable_cluster = 8, portable_shared = 40 << 10;
  if (thread_groups > INT_MAX / plan.blocks_per_row) return cudaErrorInvalidConfiguration;  // of the shortest rows 2^34
  const auto function = reinterpret_cast<const void*>(kernel);
  cudaError_t error = cudaSuccess;
  if (plan.blocks_per_row > portable_cluster)
    error = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error == cudaSuccess && shared_bytes > portable_shared) {
    cudaFuncAttributes own{};
    error = cudaFuncGetAttributes(&own, function);
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   current_device().shared_bytes - static_cast<int>(own.sharedSizeBytes));
  }
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.blocks_per_row), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(thread_groups * plan.blocks_per_row));
  config.blockDim = dim3(static_cast<unsigned>(plan.block_threads()));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = plan.blocks_per_row > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace jaxnorm::cuda
