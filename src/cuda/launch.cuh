// From a plan to a kernel: the regimes as types, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "cuda/device.h"
#include "cuda/plan.h"
#include "cuda/vector.cuh"

namespace jaxnorm::cuda {

// What of a plan the compiler has to know. CLUSTER: the most blocks of a team; 1: no cluster.
template <int THREADS, int VECTORS, int CLUSTER>
struct Regime {
  static constexpr int kThreads = THREADS, kVectors = VECTORS, kCluster = CLUSTER;
  static constexpr int kBlockThreads = THREADS == kWholeBlock ? kMaxThreads : kRowsBlockThreads;
};

// Calls f(Regime{}) with the regime of a plan whose rows share a block.
template <typename F>
cudaError_t with_shared_block(const Plan& plan, F f) {
  if (plan.threads_per_row == 8) {
    if (plan.vectors == 1) return f(Regime<8, 1, 1>{});
    if (plan.vectors == 2) return f(Regime<8, 2, 1>{});
    return f(Regime<8, 4, 1>{});
  }
  return plan.vectors == 2 ? f(Regime<32, 2, 1>{}) : f(Regime<32, 4, 1>{});
}

// How a kernel reaches rows. It makes no difference to the results.
enum class Access : uint8_t {
  elements,  // element by element, for arrays that are not aligned
  vectors,   // in vectors
  staged,    // in vectors, by way of shared memory
};

// Whether every access of a vector may be one of up to 16 bytes. N: elements a vector.
template <int N>
bool aligned_for(Dtype dtype, const void* data) {
  return reinterpret_cast<uintptr_t>(data) % std::min(16, N * size_of(dtype)) == 0;
}

// How the teams of a launch reach their rows, and how many there are where they go on to further rows.
struct Reach {
  Access access;
  int shared_bytes = 0;
  int64_t teams = INT64_MAX;

  // `stage_bytes`: of a block's stage; 0: it has none. `own_bytes`: of shared memory that its kernel declares.
  Reach(const Plan& plan, bool aligned, int stage_bytes, int own_bytes)
      : access(aligned ? Access::vectors : Access::elements) {
    const Device& device = current_device();
    if (!aligned || stage_bytes == 0 || stage_bytes + own_bytes > device.shared_bytes) return;
    access = Access::staged;
    shared_bytes = stage_bytes;
    // As many as run at once, or some more.
    constexpr int threads = 1536;  // a multiprocessor
    teams = std::max(1, device.multiprocessors * (threads / plan.block_threads()) / plan.blocks_per_row);
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

// Launches `teams` teams of the plan's size, or fewer if a grid cannot hold them: kernels loop over rows.
template <typename... Params, typename... Args>
cudaError_t launch_teams(void (*kernel)(Params...), const Plan& plan, int64_t teams, const Reach& reach,
                         cudaStream_t stream, const Args&... args) {
  // More than this has to be allowed kernel by kernel. It is the kernel's for all threads of the process, so what is
  // allowed may not depend on the call: all that there is.
  constexpr int portable_cluster = 8, portable_shared = 40 << 10;
  const auto function = reinterpret_cast<const void*>(kernel);
  cudaError_t error = cudaSuccess;
  if (plan.blocks_per_row > portable_cluster)
    error = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error == cudaSuccess && reach.shared_bytes > portable_shared) {
    cudaFuncAttributes own{};
    error = cudaFuncGetAttributes(&own, function);
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   current_device().shared_bytes - static_cast<int>(own.sharedSizeBytes));
  }
  if (error != cudaSuccess) return error;

  const int64_t groups = (teams + plan.rows_per_block - 1) / plan.rows_per_block;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.blocks_per_row), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(groups, INT_MAX / kMaxCluster) * plan.blocks_per_row));
  config.blockDim = dim3(static_cast<unsigned>(plan.block_threads()));
  config.dynamicSmemBytes = reach.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = plan.blocks_per_row > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace jaxnorm::cuda
