// Which kernels this processor runs, and how the rows of a call are shared out.
#include "cpu/launch.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/kernels.h"

namespace jaxnorm::cpu {
namespace {

const Kernels& choose() {
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (has_avx2 && has_avx512) return avx512;
  if (has_avx2) return avx2;
#endif
  return baseline;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

// The elements that are one task: enough to be worth handing to another thread. Where tasks have sums over rows, each
// costs a row of them besides.
constexpr int64_t kElements = 1 << 15, kElementsWithSums = 1 << 17;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Asks for large pages under a large output. XLA hands it over untouched, and to fault it in by 4 KiB takes several
// times as long as to compute it. A refusal is no error.
void expect_writes([[maybe_unused]] Output output, [[maybe_unused]] int64_t elements) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 1 << 21;
  const uintptr_t data = reinterpret_cast<uintptr_t>(output.data);
  const uintptr_t begin = (data + kPage - 1) & -kPage;
  const uintptr_t end = (data + elements * size_of(output.dtype)) & -kPage;
  if (output && end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// One f32 row of sums for each task, added up as a tree of fixed shape: which thread ran what does not show, and the
// error hardly grows with the number of rows.
class RowSums {
 public:
  RowSums(Output output, int64_t count, int64_t cols) : output_(output), count_(count), cols_(cols) {
    if (!output_) return;
    data_.reset(new float[count * cols]);
    expect_writes({data_.get(), Dtype::f32}, count * cols);
  }

  float* zeroed(int64_t task) {
    if (!output_) return nullptr;
    float* const row = data_.get() + task * cols_;
    std::memset(row, 0, cols_ * sizeof(float));
    return row;
  }

  void finish(const ParallelFor& parallel_for) {
    if (!output_) return;
    constexpr int64_t kFan = 64;
    for (int64_t stride = 1; stride < count_; stride *= kFan) {
      parallel_for(ceil_div(count_, stride * kFan), [&](int64_t group) {
        const int64_t first = group * stride * kFan;
        const int64_t end = std::min(count_, first + stride * kFan);
        for (int64_t row = first + stride; row < end; row += stride) {
          kernels().add(data_.get() + row * cols_, data_.get() + first * cols_, cols_);
        }
      });
    }
    kernels().cast(data_.get(), output_, cols_);
  }

 private:
  Output output_;
  int64_t count_, cols_;
  std::unique_ptr<float[]> data_;
};

// A weight as the kernels want it.
class F32Weight {
 public:
  F32Weight(Input* weight, float offset, int64_t cols) {
    if (!*weight || (weight->dtype == Dtype::f32 && offset == 0)) return;
    data_.reset(new float[cols]);
    kernels().widen(*weight, offset, data_.get(), cols);
    *weight = {data_.get(), Dtype::f32};
  }

 private:
  std::unique_ptr<float[]> data_;
};

}  // namespace

const char* isa() { return kernels().isa; }

void forward(const Forward& call, const ParallelFor& parallel_for) {
  Forward f = call;
  const F32Weight scale(&f.scale, f.scale_offset, f.cols), bias(&f.bias, 0, f.cols);
  const F32Weight smooth(&f.quantized.smooth, 0, f.cols);
  const int64_t step = std::max<int64_t>(1, kElements / f.cols), elements = f.rows * f.cols;
  const int64_t sum_size = f.sum ? size_of(f.sum.dtype) : 0;
  const Output result = f.y ? f.y : f.quantized.values;
  const int64_t traffic = elements * (size_of(f.x.dtype) + 2 * sum_size + size_of(result.dtype));
  expect_writes(result, elements);
  expect_writes(f.sum, elements);
  parallel_for(ceil_div(f.rows, step),
               [&](int64_t task) { kernels().forward(f, task * step, std::min(f.rows, (task + 1) * step), traffic); });
}

void backward(const Backward& call, const ParallelFor& parallel_for) {
  Backward b = call;
  const F32Weight scale(&b.scale, b.scale_offset, b.cols);
  // At least 8 rows share a row of sums, so that sums cost little memory; at most 512, so that they stay accurate.
  const bool with_sums = b.dscale || b.dbias;
  const int64_t step =
      with_sums ? std::clamp<int64_t>(kElementsWithSums / b.cols, 8, 512) : std::max<int64_t>(1, kElements / b.cols);
  const int64_t tasks = std::max<int64_t>(1, ceil_div(b.rows, step));  // no rows: the sums are zero
  const int64_t elements = b.rows * b.cols, of_x = b.dsum ? 3 : 2;     // arrays of x's dtype
  const int64_t traffic = elements * (of_x * size_of(b.x.dtype) + size_of(b.dy.dtype));
  expect_writes(b.dx, elements);
  RowSums dscale(b.dscale, tasks, b.cols), dbias(b.dbias, tasks, b.cols);
  parallel_for(tasks, [&](int64_t task) {
    kernels().backward(b, task * step, std::min(b.rows, (task + 1) * step), dscale.zeroed(task), dbias.zeroed(task),
                       traffic);
  });
  dscale.finish(parallel_for);
  dbias.finish(parallel_for);
}

}  // namespace jaxnorm::cpu
