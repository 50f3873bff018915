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
template <int THREADS, int VECTORS, bool CLUSTER>
struct Regime {
  static constexpr int kThreads = THREADS, kVectors = VECTORS;
  static constexpr bool kCluster = CLUSTER;
  static constexpr int kBlockThreads = THREADS == kWholeBlock ? kMaxThreads : kRowsBlockThreads;
};

// Calls f(Regime{}) with the plan's regime. MOST: the largest number of vectors a thread that make_plan gives this op.
template <int MOST, typename F>
cudaError_t with_regime(const Plan& plan, F f) {
  const bool cluster = plan.blocks_per_row > 1;
  if (plan.vectors == kStreamed)
    return cluster ? f(Regime<kWholeBlock, kStreamed, true>{}) : f(Regime<kWholeBlock, kStreamed, false>{});
  if (cluster) return f(Regime<kWholeBlock, MOST, true>{});
  if (!plan.rows_share_block()) {
    if constexpr (MOST == 8)
      if (plan.vectors == 8) return f(Regime<kWholeBlock, 8, false>{});
    return f(Regime<kWholeBlock, 4, false>{});
  }
  if (plan.threads_per_row == 8) {
    if (plan.vectors == 1) return f(Regime<8, 1, false>{});
    if (plan.vectors == 2) return f(Regime<8, 2, false>{});
    return f(Regime<8, 4, false>{});
  }
  if (plan.vectors == 2) return f(Regime<32, 2, false>{});
  if constexpr (MOST == 8)
    if (plan.vectors == 8) return f(Regime<32, 8, false>{});
  return f(Regime<32, 4, false>{});
}

// Whether every access of a vector may be one of up to 16 bytes. N: elements a vector.
template <int N>
bool aligned_for(Dtype dtype, const void* data) {
  return reinterpret_cast<uintptr_t>(data) % std::min(16, N * size_of(dtype)) == 0;
}

// The largest cluster the current device launches.
inline int max_cluster() {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (major < 9) return 1;
  return major < 12 ? kMaxCluster : 8;  // data-centre Hopper and Blackwell; consumer Blackwell has the portable 8
}

// Launches `teams` teams of the plan's size, or fewer if a grid cannot hold them: kernels loop over rows.
template <typename... Args>
cudaError_t launch(void (*kernel)(Args...), const Plan& plan, int64_t teams, cudaStream_t stream, Args... args) {
  const int64_t groups = (teams + plan.rows_per_block - 1) / plan.rows_per_block;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.blocks_per_row), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(std::min<int64_t>(groups, INT_MAX / kMaxCluster) * plan.blocks_per_row), 1, 1};
  config.blockDim = {static_cast<unsigned>(plan.block_threads()), 1, 1};
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = plan.blocks_per_row > 1 ? 1 : 0;
  if (plan.blocks_per_row > 8) {
    const auto error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                            cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
  }
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace jaxnorm::cuda
