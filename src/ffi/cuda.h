// The platform CUDA of the table of handlers.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <string>

#include "engine/cuda/device.h"
#include "ffi/table.h"

namespace jaxnorm {

// That of an op's struct; 0 where it has none.
template <class Op>
auto floats_of(const Op& op, int) -> decltype(op.workspace.floats) {
  return op.workspace.floats;
}
template <class Op>
int64_t floats_of(const Op&, long) {
  return 0;
}

// An op is run by run(op, stream), in jaxnorm::cuda or beside the op's struct.
struct Cuda {
  static constexpr bool kIsCuda = true;
  using Context = ffi::PlatformStream<cudaStream_t>;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {ffi::Traits::kCmdBufferCompatible};

  template <class Op>
  static ffi::Error call(const char* target, const Op& op, cudaStream_t stream) {
    const std::string name(target);
    if (const cudaError_t error = cuda::prepare_device(); error != cudaSuccess)
      return ffi::Error::Internal(name + ": the GPU could not be asked what it has: " + cudaGetErrorString(error));
    return outcome(name, op, run(op, cuda::Stream{stream}));
  }

  static constexpr WorkspaceFunction* workspace(WorkspaceFunction* function) { return function; }

 private:
  template <class Op>
  static ffi::Error outcome(const std::string& name, const Op& op, cudaError_t error) {
    if (error == cudaSuccess) return ffi::Error::Success();
    if (error == cudaErrorMemoryAllocation) {
      return ffi::Error::InvalidArgument(name + ": the program's workspace holds " + std::to_string(floats_of(op, 0)) +
                                         " floats, too few for these kernels: it was exported by another version of "
                                         "jaxnorm; export it again");
    }
    return ffi::Error::Internal(name + ": the launch failed: " + cudaGetErrorString(error));
  }

  // Of an op that says why in words.
  template <class Op>
  static ffi::Error outcome(const std::string& name, const Op&, const std::string& why) {
    return why.empty() ? ffi::Error::Success() : ffi::Error::Internal(name + ": " + why);
  }
};

}  // namespace jaxnorm
