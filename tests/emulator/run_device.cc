// Asks a GPU that fails now and then, and compares what is known of it afterwards.
#include <cstdio>

#include "engine/cuda/device.h"

namespace {

int calls = 0, failing = -1;  // which call fails, of those since it was set

cudaError_t next(cudaError_t error = cudaSuccess) {
  return calls++ == failing ? cudaErrorStreamCaptureUnsupported : error;
}

}  // namespace

extern "C" cudaError_t cudaGetDevice(int* id) {
  *id = 0;
  return next();
}
extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  *value = what == cudaDevAttrMultiProcessorCount ? 132 : what == cudaDevAttrClusterLaunch ? 1 : 227 << 10;
  return next();
}
extern "C" cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* code, const void*) {
  code->ptxVersion = 90;
  return next();
}
extern "C" cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return next(); }
extern "C" cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t* config) {
  const int blocks = static_cast<int>(config->gridDim.x);
  *clusters = 132 / blocks;
  return next(blocks > 8 ? cudaErrorInvalidClusterSize : cudaSuccess);  // which is no failure
}
extern "C" cudaError_t cudaGetLastError() { return cudaSuccess; }

int main() {
  using namespace jaxnorm::cuda;
  int failures = 0;
  const auto expect = [&](bool holds, const char* what) {
    if (holds) return;
    ++failures;
    std::printf("%s, call %d\n", what, failing);
  };
  // Whichever of the questions fails.
  constexpr int questions = 1 + 3 + 1 + 4 * 3;
  for (failing = 0; failing < questions; ++failing) {
    calls = 0;
    expect(prepare_device() == cudaErrorStreamCaptureUnsupported, "a failure is an error");
  }
  failing = -1;
  expect(prepare_device() == cudaSuccess, "the next time it answers");
  const Device& device = current_device();
  expect(device.multiprocessors == 132 && device.shared_bytes == 227 << 10, "what it has");
  expect(device.max_cluster() == 8 && device.groups_at_once(4) == 33, "its clusters");
  calls = 0;
  expect(prepare_device() == cudaSuccess && calls == 1, "it is asked once");
  std::printf("%d failures\n", failures);
  return failures > 0;
}
