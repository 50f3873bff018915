// From a plan to a kernel: the regimes as types, what a kernel knows of its launch, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <initializer_list>
#include <iterator>

#include "engine/cuda/device.h"
#include "engine/cuda/pipeline.cuh"
#include "engine/cuda/plan.h"
#include "engine/cuda/vector.cuh"

namespace jaxnorm::cuda {

// What the compiler has to know of a plan. CLUSTER: the most blocks of a thread group; 1: no cluster. MOST: the most
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

// An entry of a table of regimes as a type.
template <typename TABLE, int ENTRY>
struct TableRegime
    : Regime<TABLE::kTable.entry[ENTRY].threads, TABLE::kTable.entry[ENTRY].vectors,
             (TABLE::kTable.entry[ENTRY].blocks > 1 ? kMaxCluster : 1), TABLE::kTable.entry[ENTRY].block_threads> {
  static constexpr Registers kRegisters = TABLE::kTable.entry[ENTRY].registers;
  static constexpr bool kDividedOnly = TABLE::kTable.entry[ENTRY].divided_only;
};

// The regime of rows that are read again in each pass. Where one warp has a row, vectors past its end add zeros: the
// most that so many threads have serve all rows.
template <typename R>
struct Reread {
  using Regime = R;
};
template <typename TABLE, int ENTRY>
struct Reread<TableRegime<TABLE, ENTRY>> {
  static constexpr int last() {
    const auto& entry = TABLE::kTable.entry;
    int at = ENTRY;
    while (entry[at].threads > 0 && entry[at + 1].threads == entry[at].threads) ++at;
    return at;
  }
  using Regime = TableRegime<TABLE, last()>;
};

// Calls f with the regime of a plan that was made from the table: there is one for each of its entries.
template <typename TABLE, int ENTRY = 0, typename F>
cudaError_t with_regime(const Plan& plan, F f) {
  if constexpr (ENTRY == static_cast<int>(std::size(TABLE::kTable.entry))) {
    return cudaErrorInvalidValue;  // the plan was made from another table
  } else {
    return plan.entry == ENTRY ? f(TableRegime<TABLE, ENTRY>{}) : with_regime<TABLE, ENTRY + 1>(plan, f);
  }
}

// How many blocks of so many threads a multiprocessor holds, with so many registers each; 0: any number of registers. A
// quarter of a multiprocessor has a quarter of the registers, and of the warps.
constexpr int resident_blocks(int registers, int threads) {
  if (registers == 0) return 0;
  return (16 << 10) / (registers * kWarp) * 4 * kWarp / threads;
}

// How a kernel reaches rows: in vectors or, where those do not divide a row, in elements, unless it can do with
// unaligned vectors. How it does either makes no difference to the results.
enum class Access : uint8_t {
  pipelined,    // aligned vectors, by way of shared memory
  vectors,      // aligned vectors
  elementwise,  // vectors, each read and written element by element
  unaligned,    // vectors, by way of the 16-byte words of memory in which they lie
  pipelined_scalar,
  scalar,
};

template <Access ACCESS>
constexpr bool kIsPipelined = ACCESS == Access::pipelined || ACCESS == Access::pipelined_scalar;

template <Access ACCESS>
using AccessAs = std::integral_constant<Access, ACCESS>;

// Whether every access of a vector may be one of up to 16 bytes. N: elements a vector.
template <int N>
bool aligned_for(Dtype dtype, const void* data) {
  return reinterpret_cast<uintptr_t>(data) % std::min(16, N * size_of(dtype)) == 0;
}

// The same of all arrays, absent ones included.
template <int N, typename... Arrays>
bool are_aligned(const Arrays&... arrays) {
  return (aligned_for<N>(arrays.dtype, arrays.data) && ...);
}

// Quotients by a number that is known at the launch, without a division: exact for 0 to 2^63 - 1.
struct Divisor {
  int64_t value;
  uint64_t factor;  // 2^(63 + shift) / value, rounded up
  int shift;        // 2^shift is at least `value`

  explicit Divisor(int64_t value) : value(value), shift(0) {
    while (uint64_t{1} << shift < static_cast<uint64_t>(value)) ++shift;
    factor = static_cast<uint64_t>(((static_cast<unsigned __int128>(1) << (63 + shift)) + value - 1) / value);
  }

  __device__ int64_t quotient(int64_t number) const {
    return static_cast<int64_t>(__umul64hi(2 * static_cast<uint64_t>(number), factor) >> shift);
  }
  __device__ int64_t remainder(int64_t number) const { return number - quotient(number) * value; }
};

// The same of numbers from 0 to 2^31 - 1, in a few instructions.
struct SmallDivisor {
  int value;
  uint32_t factor;  // 2^(31 + shift) / value, rounded up
  int shift;        // 2^shift is at least `value`

  explicit SmallDivisor(int64_t value) : value(static_cast<int>(value)), shift(0) {
    while (int64_t{1} << shift < value) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + value - 1) / value);
  }

  __device__ int quotient(int number) const {
    const uint64_t product = uint64_t{2 * static_cast<uint32_t>(number)} * factor;
    return static_cast<int>(static_cast<uint32_t>(product >> 32) >> shift);
  }
  __device__ int remainder(int number) const { return number - quotient(number) * value; }
};

// The same map without a division. A plain op has one row of weights, and pays a branch for it.
struct RowMapLaunch {
  Divisor count, inner;
  int64_t skipped;      // rows of x between the runs of neighbouring rows that go with one row of the operand
  bool has_neighbours;  // whether there are such runs, and of several rows

  explicit RowMapLaunch(const RowMap& weight_rows)
      : count(weight_rows.count),
        inner(weight_rows.inner),
        skipped((weight_rows.count - 1) * weight_rows.inner),
        has_neighbours(weight_rows.count > 1 && weight_rows.inner > 1) {}

  // The row of the operand.
  __device__ int64_t of_row(int64_t row) const {
    return count.value == 1 ? 0 : count.remainder(inner.value == 1 ? row : inner.quotient(row));
  }

  // The index-th of the rows of x that go with a row of the operand.
  __device__ int64_t row_of(int64_t operand_row, int64_t index) const {
    return count.value == 1 ? index : index + inner.quotient(index) * skipped + operand_row * inner.value;
  }
};

// An operand from element `at` on, if it is there.
__device__ inline Input from(const Input& weight, int64_t at) {
  if (!weight.data) return weight;
  return {static_cast<const char*>(weight.data) + at * (weight.dtype == Dtype::f32 ? 4 : 2), weight.dtype};
}

// An array that pipelines hold rows of: bytes of an element, and elements from a row to the next.
struct PipelineArray {
  int size;
  int64_t stride;
};

// What a kernel that goes by rows has to know of its launch. `Own` is what only some ops have to know. Its size decides
// whether the pipelines' shape begins at a multiple of 8 bytes, and with that which members come in one load. Kernels
// with pipelines take more or fewer registers for it: the backward wants the place between two multiples (83 registers
// over 127 kernels of bf16), the forward a multiple, but for f32 rows that are quantised.
template <typename Own>
struct RowsLaunchOf {
  int threads_per_row, rows_per_block;
  int64_t span;  // how many columns each block of a cluster has
  float reciprocal_cols;
  RowMapLaunch weight_rows;
  int64_t step = 0, end = 0;  // of a grid-stride schedule: rows from a step to the next, and how many rows there are
  int64_t last_step = 0;      // rows from the first step to the last
  Own own = {};
  PipelineShape pipeline = {};

  RowsLaunchOf(const Plan& plan, int64_t cols, int vector, const RowMap& weight_rows)
      : threads_per_row(plan.threads_per_row),
        rows_per_block(plan.rows_per_block),
        span(int64_t{plan.threads_per_row} * plan.vectors * vector),
        reciprocal_cols(1.0f / static_cast<float>(cols)),
        weight_rows(weight_rows) {
    // The blocks of a streamed row share it evenly, in whole vectors.
    if (plan.vectors == kStreamed)
      span = ((cols + vector - 1) / vector + plan.blocks_per_row - 1) / plan.blocks_per_row * vector;
  }

  void set_grid_stride(int64_t rows_of_step, int64_t rows) {
    step = rows_of_step;
    end = rows;
    last_step = rows > 0 ? (rows - 1) / step * step : 0;
  }

  // For clusters with pipelines, which draw tickets for the rows that they have no room for at first. The workspace has
  // the count of tickets. Without it there are so many clusters that each has room for its rows.
  cudaError_t schedule_dynamically(int64_t& clusters, int64_t rows, const Workspace& workspace, cudaStream_t stream) {
    if (rows > INT_MAX) return cudaErrorInvalidValue;
    if (rows > clusters * pipeline.stages && workspace.floats < 1)
      clusters = (rows + pipeline.stages - 1) / pipeline.stages;
    set_grid_stride(clusters, rows);
    if (rows <= clusters * pipeline.stages) return cudaSuccess;
    own.tickets = reinterpret_cast<uint32_t*>(workspace.data);
    return cudaMemsetAsync(own.tickets, 0, sizeof *own.tickets, stream);
  }

  // The rows of a block that begins at row `first` of each step, from the last step to the first: of what was written
  // just now the cache still has the end, and whoever reads the result begins at its beginning.
  __device__ Rows backwards(int64_t first, int block_rows) const { return {first + last_step, -step, end, block_rows}; }

  __device__ Rows forwards(int64_t first, int block_rows) const { return {first, step, end, block_rows}; }

  // The rows of a cluster with a pipeline.
  template <bool DYNAMIC>
  __device__ auto cluster_rows(int64_t cluster) const {
    if constexpr (DYNAMIC) {
      return DynamicRows{{end - step + cluster, -step, end, 1}, static_cast<int>(step) * pipeline.stages, own.tickets};
    } else {
      return backwards(cluster, 1);
    }
  }

  // Sets up pipelines, if the device can have them. `held`: how many rows a thread group has at once. Returns how many
  // bytes of shared memory a block needs, with `besides` bytes after the pipelines; 0: there are no pipelines.
  int with_pipelines(const Plan& plan, int64_t cols, std::initializer_list<PipelineArray> arrays, int held,
                     int besides = 0) {
    const Device& device = current_device();
    const int rows = std::max(1, kWarp / plan.threads_per_row),
              pipelines = plan.rows_per_block / rows;  // rows: of a stage
    // Rows that vectors do not divide begin and end anywhere in a 16-byte word.
    const bool uneven =
        std::any_of(arrays.begin(), arrays.end(), [&](auto array) { return cols * array.size % 16 != 0; });
    int stage = 0, i = 0;  // bytes of a stage of all pipelines of a block
    for (const PipelineArray array : arrays) {
      if (array.stride > INT_MAX / array.size / rows) return 0;
      const int64_t bytes = ((rows - 1) * array.stride + std::min(cols, span)) * array.size + (uneven ? 32 : 0);
      if (bytes > device.shared_bytes) return 0;
      pipeline.bytes[i] = static_cast<int>((bytes + 127) / 128 * 128);
      pipeline.stride[i] = static_cast<int>(array.stride);
      stage += pipelines * pipeline.bytes[i++];
    }
    // Enough in flight to keep the memory busy. More would be slower: some multiprocessors would be served faster than
    // others, which has them finish early, and the further apart the rows are that they are at, the less of what they
    // ask for lies side by side.
    constexpr int in_flight = 64 << 10;
    const int wanted = std::max(plan.blocks_per_row > 2 ? 3 : 2, held + (in_flight + stage - 1) / stage);
    pipeline.stages = std::min({wanted, (device.shared_bytes - kOwnBytes - besides) / stage, kMaxStages / pipelines});
    if (!device.has_clusters() || pipeline.stages <= held) return 0;
    return pipeline.stages * stage + besides;
  }
};

struct ForwardOwn {
  int64_t y_pad = 0;            // elements after each row of the result that are set to zero
  uint32_t* tickets = nullptr;  // as in DynamicRows
};
using RowsLaunch = RowsLaunchOf<ForwardOwn>;

template <typename... Params, typename... Args>
cudaError_t launch_grid(void (*kernel)(Params...), dim3 grid, dim3 block, cudaStream_t stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Launches so many blocks or clusters.
template <typename... Params, typename... Args>
cudaError_t launch_groups(void (*kernel)(Params...), const Plan& plan, int64_t blocks_or_clusters, int shared_bytes,
                          cudaStream_t stream, const Args&... args) {
  // More than this has to be allowed kernel by kernel, for all threads of the process. So what is allowed may not
  // depend on the call: it is all that there is.
  constexpr int portable_cluster = 8, portable_shared = 40 << 10;
  if (blocks_or_clusters > INT_MAX / plan.blocks_per_row) return cudaErrorInvalidConfiguration;
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
  config.gridDim = dim3(static_cast<unsigned>(blocks_or_clusters * plan.blocks_per_row));
  config.blockDim = dim3(static_cast<unsigned>(plan.block_threads()));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = plan.blocks_per_row > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace jaxnorm::cuda
