// The module of src/ffi/cuda_module.cc for XLA's CPU: its handlers run the emulator.
#include <mutex>

#include "engine/cuda/cublaslt.h"
#include "engine/cuda/device.h"
#include "ffi/cuda.h"
#include "ops/quantized_dot/call.h"

namespace jaxnorm {

// XLA's CPU has several calls at once, and the emulator one device.
struct Emulated : Cuda {
  using Context = ffi::ThreadPool;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};

  template <class Op>
  static ffi::Error call(const char* target, const Op& op, ffi::ThreadPool&) {
    const std::lock_guard lock(device());
    return Cuda::call(target, op, nullptr);
  }

 private:
  static std::mutex& device() {
    static std::mutex mutex;
    return mutex;
  }
};

namespace cuda {

cudaError_t prepare_device() { return cudaSuccess; }

constexpr char kNone[] = "the emulator has no cuBLASLt";

const cublaslt::Library* cublaslt::open(const std::vector<std::string>&, std::string& why) {
  why = kNone;
  return nullptr;
}

std::string run(const QuantizedDot&, Stream) { return kNone; }

WorkspaceSize quantized_dot_workspace(const WorkspaceQuery&) { return {}; }

}  // namespace cuda
}  // namespace jaxnorm

extern "C" cudaError_t cudaDriverGetVersion(int*) { return cudaErrorInsufficientDriver; }

#define Cuda Emulated
#include "ffi/cuda_module.cc"
