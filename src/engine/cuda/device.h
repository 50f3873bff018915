// What launches have to know: of the current device, asked once, and of a dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "operands.h"

namespace jaxnorm::cuda {

struct Stream {
  cudaStream_t handle;
  operator cudaStream_t() const { return handle; }
};

struct Outcome {
  cudaError_t error;
  operator cudaError_t() const { return error; }
};

struct Device {
  int multiprocessors = 1;
  int shared_bytes = 0;  // the most that a block may be allowed, its kernel's own included
  int clusters[5] = {};  // how many clusters of 1, 2, ... 16 blocks as large as any run at once

  bool has_clusters() const { return clusters[1] > 0; }

  // The largest cluster that it can launch; 1: none.
  int max_cluster() const {
    int blocks = 1;
    for (int i = 1; i < 5 && clusters[i] > 0; ++i) blocks *= 2;
    return blocks;
  }

  // How many thread groups of as many blocks, each with a multiprocessor for itself, run at once.
  int groups_at_once(int blocks) const {
    int i = 0;
    while (1 << i < blocks) ++i;
    return i == 0 ? multiprocessors : clusters[i];
  }
};

// Asks the current device, unless it has answered before. A call begins with this: plans, and with them bits, follow
// from the answer, so that there is none without it.
cudaError_t prepare_device();

// After prepare_device. Of a device that could not be asked, one that can do nothing.
const Device& current_device();

// From a dtype to the code for it: f with a value of the type.
template <typename F>
cudaError_t with_dtype(Dtype dtype, F f) {
  if (dtype == Dtype::f32) return f(float{});
  return dtype == Dtype::f16 ? f(__half{}) : f(__nv_bfloat16{});
}

}  // namespace jaxnorm::cuda
