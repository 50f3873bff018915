// Thread-block clusters (sm_90 and later), so that code that uses them compiles for older architectures, where it is
// never launched.
#pragma once

#include <cooperative_groups.h>

namespace jaxnorm::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

constexpr bool kHasClusters = true;

struct Cluster {
  __device__ static int rank() { return cooperative_groups::this_cluster().block_rank(); }
  __device__ static int blocks() { return cooperative_groups::this_cluster().num_blocks(); }
  __device__ static void sync() { cooperative_groups::this_cluster().sync(); }
  // Where `block` keeps what this block keeps at `shared`.
  template <typename T>
  __device__ static T* shared_of(T* shared, int block) {
    return cooperative_groups::this_cluster().map_shared_rank(shared, block);
  }
};

#else

constexpr bool kHasClusters = false;

struct Cluster {
  __device__ static int rank() { return 0; }
  __device__ static int blocks() { return 1; }
  __device__ static void sync() { __trap(); }
  template <typename T>
  __device__ static T* shared_of(T* shared, int) {
    return shared;
  }
};

#endif

}  // namespace jaxnorm::cuda
