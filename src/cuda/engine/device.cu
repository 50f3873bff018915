#include <cuda_runtime.h>

#include <mutex>

#include "cuda/engine/device.h"
#include "cuda/engine/plan.h"

namespace jaxnorm::cuda {
namespace {

constexpr int kMaxDevices = 64;

// Stands for every kernel that runs in clusters.
__global__ void __launch_bounds__(kMaxThreads) probe_kernel() {}

// How many clusters of as many blocks run at once.
int clusters_of(int blocks, int shared_bytes) {
  const auto probe = reinterpret_cast<const void*>(probe_kernel);
  cudaFuncSetAttribute(probe, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaFuncSetAttribute(probe, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(blocks), 1, 1};
  config.blockDim = {kMaxThreads, 1, 1};
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  return cudaOccupancyMaxActiveClusters(&clusters, probe, &config) == cudaSuccess ? clusters : 0;
}

Device query(int id) {
  const auto attribute = [&](cudaDeviceAttr what) {
    int value = 0;
    cudaDeviceGetAttribute(&value, what, id);
    return value;
  };
  Device device;
  device.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  device.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  // Code that was compiled for an older architecture has no clusters, whatever it runs on.
  cudaFuncAttributes code{};
  cudaFuncGetAttributes(&code, probe_kernel);
  if (code.ptxVersion >= 90 && attribute(cudaDevAttrClusterLaunch))
    for (int i = 1; 1 << i <= kMaxCluster; ++i) device.clusters[i] = clusters_of(1 << i, device.shared_bytes);
  cudaGetLastError();  // what the device cannot do is no error
  return device;
}

}  // namespace

const Device& current_device() {
  static std::once_flag asked[kMaxDevices];
  static Device devices[kMaxDevices];
  int id = 0;
  cudaGetDevice(&id);
  if (id >= kMaxDevices) id = kMaxDevices - 1;  // XLA names devices from 0
  std::call_once(asked[id], [&] { devices[id] = query(id); });
  return devices[id];
}

}  // namespace jaxnorm::cuda
