#include <cuda_runtime.h>

#include <atomic>
#include <mutex>

#include "engine/cuda/device.h"
#include "engine/cuda/plan.h"

namespace jaxnorm::cuda {
namespace {

constexpr int kMaxDevices = 64;

// Stands for every kernel that runs in clusters.
__global__ void __launch_bounds__(kMaxThreads) probe_kernel() {}

// What a device answers that cannot have such clusters.
bool is_refusal(cudaError_t error) {
  return error == cudaErrorInvalidClusterSize || error == cudaErrorInvalidConfiguration ||
         error == cudaErrorInvalidValue || error == cudaErrorNotSupported;
}

// How many clusters of as many blocks run at once.
cudaError_t count_clusters(int blocks, int shared_bytes, int& clusters) {
  const auto probe = reinterpret_cast<const void*>(probe_kernel);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(blocks), 1, 1};
  config.blockDim = {kMaxThreads, 1, 1};
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaError_t error = cudaFuncSetAttribute(probe, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(probe, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, probe, &config);
  if (error == cudaSuccess) return error;
  clusters = 0;
  cudaGetLastError();  // no later call is to find it
  return is_refusal(error) ? cudaSuccess : error;
}

cudaError_t query(int id, Device& device) {
  int has_clusters = 0;
  cudaFuncAttributes code{};
  cudaError_t error = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, id);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&has_clusters, cudaDevAttrClusterLaunch, id);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(probe_kernel));
  // Code that was compiled for an older architecture has no clusters, whatever it runs on.
  if (code.ptxVersion < 90 || !has_clusters) return error;
  for (int i = 1; error == cudaSuccess && 1 << i <= kMaxCluster; ++i)
    error = count_clusters(1 << i, device.shared_bytes, device.clusters[i]);
  return error;
}

// The current device, null where it could not be asked. What failed once may not fail again, so it is not kept.
cudaError_t find_device(const Device*& found) {
  static std::mutex mutex;
  static std::atomic<bool> known[kMaxDevices];
  static Device devices[kMaxDevices];
  int id = 0;
  found = nullptr;
  cudaError_t error = cudaGetDevice(&id);
  if (error != cudaSuccess) return error;
  if (id >= kMaxDevices) id = kMaxDevices - 1;  // XLA names devices from 0
  if (!known[id]) {
    const std::lock_guard<std::mutex> lock(mutex);
    Device device;
    if (!known[id] && (error = query(id, device)) != cudaSuccess) {
      cudaGetLastError();  // no later call is to find it
      return error;
    }
    if (!known[id]) devices[id] = device;
    known[id] = true;
  }
  found = &devices[id];
  return cudaSuccess;
}

}  // namespace

cudaError_t prepare_device() {
  const Device* device;
  return find_device(device);
}

const Device& current_device() {
  static const Device unknown;
  const Device* device;
  return find_device(device) == cudaSuccess ? *device : unknown;
}

}  // namespace jaxnorm::cuda
