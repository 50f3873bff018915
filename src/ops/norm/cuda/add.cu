// sum = a + b or factor * a + b, rounded to b's type: kernels of their own for the sums that no fused kernel forms.
// Without b, a in sum's type.
#include "engine/cuda/device.h"
#include "engine/cuda/fragment.cuh"
#include "engine/cuda/launch.cuh"
#include "ops/norm/call.h"

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

// A vector is of one row, and so of one row of the factor.
template <typename A, typename T, int N>
__global__ void __launch_bounds__(kAddThreads)
    scaled_add_kernel(const A* a, const T* b, T* sum, int64_t elements, Input factor, Divisor cols, RowMapLaunch rows) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x * N;
  for (int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N; first < elements; first += step) {
    const int64_t row = cols.quotient(first), column = first - row * cols.value;
    const Packed<A, N> a_vector = load<true, N>(a + first, N);
    const Packed<T, N> b_vector = load<true, N>(b + first, N);
    float factors[N];
    load_floats<true>(factor, rows.of_row(row) * cols.value + column, N, factors);
    store<true>(sum + first, scaled_sum_of(factors, a_vector, b_vector), N);
  }
}

dim3 grid_of(int64_t vectors) {
  return dim3(static_cast<unsigned>(std::min<int64_t>((vectors + kAddThreads - 1) / kAddThreads, INT_MAX)));
}

template <int N, typename A, typename T>
cudaError_t scaled_add_as(const Addition& p, int64_t rows, int64_t cols, cudaStream_t stream) {
  return launch_grid(scaled_add_kernel<A, T, N>, grid_of(rows * cols / N), kAddThreads, stream,
                     static_cast<const A*>(p.a.data), static_cast<const T*>(p.b.data), static_cast<T*>(p.sum.data),
                     rows * cols, p.factor, Divisor(cols), RowMapLaunch(p.factor_rows));
}

template <typename A, typename T>
cudaError_t add_as(const Addition& p, int64_t rows, int64_t cols, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const int64_t elements = rows * cols, vectors = (elements + N - 1) / N;
  if (p.factor)
    return cols % N == 0 && are_aligned<N>(p.a, p.b, p.sum, p.factor) ? scaled_add_as<N, A, T>(p, rows, cols, stream)
                                                                      : scaled_add_as<1, A, T>(p, rows, cols, stream);
  const bool is_aligned = elements % N == 0 && are_aligned<N>(p.a, p.b, p.sum);
  const dim3 grid = grid_of(vectors);
  return launch_grid(is_aligned ? add_kernel<A, T, true> : add_kernel<A, T, false>, grid, kAddThreads, stream,
                     static_cast<const A*>(p.a.data), static_cast<const T*>(p.b.data), static_cast<T*>(p.sum.data),
                     elements);
}

template <typename T>
cudaError_t add_to(const Addition& p, int64_t rows, int64_t cols, cudaStream_t stream) {
  if (p.a.dtype == kDtype<T>) return add_as<T, T>(p, rows, cols, stream);
  if constexpr (std::is_same_v<T, float>) {
    return p.a.dtype == Dtype::f16 ? add_as<__half, T>(p, rows, cols, stream)
                                   : add_as<__nv_bfloat16, T>(p, rows, cols, stream);
  } else {
    return add_as<float, T>(p, rows, cols, stream);
  }
}

}  // namespace

Outcome add(const Addition& p, int64_t rows, int64_t cols, Stream stream) {
  return {with_dtype(p.sum.dtype, [&](auto type) { return add_to<decltype(type)>(p, rows, cols, stream); })};
}

}  // namespace jaxnorm::cuda
