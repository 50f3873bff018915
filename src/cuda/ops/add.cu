// The sum of a residual connection as a kernel of its own, for calls that no one kernel does.
#include "cuda/engine/fragment.cuh"
#include "cuda/engine/launch.cuh"
#include "cuda/norms.h"

namespace jaxnorm::cuda {
namespace {

constexpr int kAddThreads = 256;

// sum may be where b is: a thread reads what it will write.
template <typename A, typename T, bool ALIGNED>
__global__ void __launch_bounds__(kAddThreads) add_kernel(const A* a, const T* b, T* sum, int64_t elements) {
  constexpr int N = kVector<T>;
  const int64_t step = int64_t{gridDim.x} * blockDim.x * N;
  for (int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N; first < elements; first += step) {
    const int left = static_cast<int>(min(int64_t{N}, elements - first));
    store<ALIGNED>(sum + first, sum_of(load<ALIGNED, N>(a + first, left), load<ALIGNED, N>(b + first, left)), left);
  }
}

template <typename A, typename T>
cudaError_t add_as(const Forward& p, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const int64_t elements = p.rows * p.cols, vectors = (elements + N - 1) / N;
  const bool aligned = elements % N == 0 && aligned_for<N>(p.x.dtype, p.x.data) &&
                       aligned_for<N>(p.residual.dtype, p.residual.data) && aligned_for<N>(p.sum.dtype, p.sum.data);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>((vectors + kAddThreads - 1) / kAddThreads, INT_MAX)));
  return launch_grid(aligned ? add_kernel<A, T, true> : add_kernel<A, T, false>, grid, kAddThreads, stream,
                     static_cast<const A*>(p.x.data), static_cast<const T*>(p.residual.data),
                     static_cast<T*>(p.sum.data), elements);
}

template <typename T>
cudaError_t add_to(const Forward& p, cudaStream_t stream) {
  if (p.x.dtype == kDtype<T>) return add_as<T, T>(p, stream);
  if constexpr (std::is_same_v<T, float>) {
    return p.x.dtype == Dtype::f16 ? add_as<__half, T>(p, stream) : add_as<__nv_bfloat16, T>(p, stream);
  } else {
    return add_as<float, T>(p, stream);
  }
}

}  // namespace

cudaError_t add(const Forward& p, cudaStream_t stream) {
  if (p.sum.dtype == Dtype::f32) return add_to<float>(p, stream);
  return p.sum.dtype == Dtype::f16 ? add_to<__half>(p, stream) : add_to<__nv_bfloat16>(p, stream);
}

}  // namespace jaxnorm::cuda
