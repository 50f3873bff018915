// From a plan to a kernel: the regimes as types, and the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <type_traits>

#include "cuda/plan.h"
#include "cuda/vector.cuh"

namespace jaxnorm::cuda {

// What of a plan the compiler has to know.
template <int THREADS, int VECTORS, bool CLUSTER, bool STAGED = CLUSTER>
struct Regime {
  static constexpr int kThreads = THREADS, kVectors = VECTORS;
  static constexpr bool kCluster = CLUSTER, kStaged = STAGED;
  static constexpr int kBlockThreads = THREADS == kWholeBlock ? kMaxThreads : kRowsBlockThreads;
};

// Calls f(Regime{}) with the regime of a plan whose rows share a block.
template <typename F>
cudaError_t with_shared_block(const Plan& plan, F f) {
  if (plan.threads_per_row == 8) {
    if (plan.vectors == 1) return f(Regime<8, 1, false>{});
    if (plan.vectors == 2) return f(Regime<8, 2, false>{});
    return f(Regime<8, 4, false>{});
  }
  return plan.vectors == 2 ? f(Regime<32, 2, false>{}) : f(Regime<32, 4, false>{});
}

// Whether every access of a vector may be one of up to 16 bytes. N: elements a vector.
template <int N>
bool aligned_for(Dtype dtype, const void* data) {
  return reinterpret_cast<uintptr_t>(data) % std::min(16, N * size_of(dtype)) == 0;
}

// An attribute of the current device.
inline int attribute_of(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

// What every launch may ask for; more has to be allowed kernel by kernel.
constexpr int kPortableCluster = 8;
constexpr int kOwnShared = 8 << 10;  // above what any kernel declares for itself
constexpr int kPortableShared = (48 << 10) - kOwnShared;

// The largest cluster the current device launches.
inline int max_cluster() {
  const int major = attribute_of(cudaDevAttrComputeCapabilityMajor);
  if (major < 9) return 1;
  return major < 12 ? kMaxCluster
                    : kPortableCluster;  // data-centre Hopper and Blackwell; consumer Blackwell has the portable 8
}

// Whether and how the blocks of a launch stage their rows, `bytes` each.
struct Staging {
  bool aligned;               // false also where a stage would not fit: the kernels' unaligned paths need none
  int bytes = 0;              // of shared memory a block
  int64_t teams = INT64_MAX;  // as many as a device runs at once, or some more; they go on to further rows

  Staging(const Plan& plan, bool aligned_, int stage_bytes) : aligned(aligned_) {
    if (!aligned || stage_bytes == 0 || plan.vectors == kStreamed) return;
    aligned = stage_bytes <= attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kOwnShared;
    if (!aligned) return;
    bytes = stage_bytes;
    teams =
        std::max(1, attribute_of(cudaDevAttrMultiProcessorCount) * (1536 / plan.block_threads()) / plan.blocks_per_row);
  }
};

// Launches `teams` teams of the plan's size, or fewer if a grid cannot hold them: kernels loop over rows.
template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), const Plan& plan, int64_t teams, int shared_bytes, cudaStream_t stream,
                   const Args&... args) {
  const int64_t groups = (teams + plan.rows_per_block - 1) / plan.rows_per_block;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.blocks_per_row), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(std::min<int64_t>(groups, INT_MAX / kMaxCluster) * plan.blocks_per_row), 1,
                    1};
  config.blockDim = {static_cast<unsigned>(plan.block_threads()), 1, 1};
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = plan.blocks_per_row > 1 ? 1 : 0;
  const auto allow = [&](cudaFuncAttribute what, int value) {
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), what, value);
  };
  cudaError_t error = cudaSuccess;
  if (plan.blocks_per_row > kPortableCluster) error = allow(cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (shared_bytes > kPortableShared) error = allow(cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  return error == cudaSuccess ? cudaLaunchKernelEx(&config, kernel, args...) : error;
}

}  // namespace jaxnorm::cuda
