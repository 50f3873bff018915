// sum = a + b, rounded to b's type: a kernel of its own for the sums that no fused kernel forms. Without b, a in sum's
// type.
#include "cuda/engine/fragment.cuh"
#include "cuda/engine/launch.cuh"
#include "ops/norm/cuda.h"

namespace jaxnorm::cuda {
namespace {

constexpr int kAddThreads = 256;

// sum may be where b is: a thread reads what it will write.
template <typename A, typename T, bool ALIGNED>
__global__ void __launch_bounds__(kAddThreads) add_kernel(const A* a, const T* b, T* sum, int64_t elements) {
  constexpr int N = kVector<T>;
  const int64_t step = int64_t{gridDim.x} * blockDim.x * N;
  for (int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N; first < elements; first += step) {
    const int remaining = static_cast<int>(min(int64_t{N}, elements - first));
    const Packed<A, N> a_vector = load<ALIGNED, N>(a + first, remaining);
    Packed<T, N> total;
    if (b) {
      total = sum_of(a_vector, load<ALIGNED, N>(b + first, remaining));
    } else {
      float values[N];
      unpack(a_vector, values);
      total = pack<T>(values);
    }
    store<ALIGNED>(sum + first, total, remaining);
  }
}

template <typename A, typename T>
cudaError_t add_as(const Addition& p, int64_t elements, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const int64_t vectors = (elements + N - 1) / N;
  const bool is_aligned = elements % N == 0 && are_aligned<N>(p.a, p.b, p.sum);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>((vectors + kAddThreads - 1) / kAddThreads, INT_MAX)));
  return launch_grid(is_aligned ? add_kernel<A, T, true> : add_kernel<A, T, false>, grid, kAddThreads, stream,
                     static_cast<const A*>(p.a.data), static_cast<const T*>(p.b.data), static_cast<T*>(p.sum.data),
                     elements);
}

template <typename T>
cudaError_t add_to(const Addition& p, int64_t elements, cudaStream_t stream) {
  if (p.a.dtype == kDtype<T>) return add_as<T, T>(p, elements, stream);
  if constexpr (std::is_same_v<T, float>) {
    return p.a.dtype == Dtype::f16 ? add_as<__half, T>(p, elements, stream)
                                   : add_as<__nv_bfloat16, T>(p, elements, stream);
  } else {
    return add_as<float, T>(p, elements, stream);
  }
}

}  // namespace

cudaError_t add(const Addition& p, int64_t elements, cudaStream_t stream) {
  if (p.sum.dtype == Dtype::f32) return add_to<float>(p, elements, stream);
  return p.sum.dtype == Dtype::f16 ? add_to<__half>(p, elements, stream) : add_to<__nv_bfloat16>(p, elements, stream);
}

}  // namespace jaxnorm::cuda
