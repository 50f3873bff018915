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

// Calls task(begin, end) for blocks of `count` neighbouring elements.
template <class Task>
void for_each_block(const ParallelFor& parallel_for, int64_t count, Task task) {
  parallel_for(ceil_div(count, kElements),
               [&](int64_t block) { task(block * kElements, std::min(count, (block + 1) * kElements)); });
}

// How the rows of a backward are shared out. Row k of head h is row (k / inner * count + h) * inner + k % inner of x; a
// task has the same `step` rows of each of `group` neighbouring heads. Without sums over rows all rows are of one head.
class Tasks {
 public:
  Tasks(const Backward& b, bool with_sums) : heads_(with_sums ? b.weight_rows : RowMap{}) {
    // At least 8 rows share a row of sums, so that sums cost little memory; at most 512, so that they stay accurate.
    step_ = with_sums ? std::clamp<int64_t>(kElementsWithSums / (b.cols * heads_.count), 8, 512)
                      : std::max<int64_t>(1, kElements / b.cols);
    if (heads_.count == 1) heads_.inner = std::max<int64_t>(1, b.rows);
    rows_of_head_ = b.rows / heads_.count;
    chunks_ = std::max<int64_t>(1, ceil_div(rows_of_head_, step_));  // no rows: the sums are zero
    group_ =
        std::clamp<int64_t>(kElementsWithSums / b.cols / std::clamp<int64_t>(rows_of_head_, 1, step_), 1, heads_.count);
    groups_ = ceil_div(heads_.count, group_);
  }

  int64_t count() const { return chunks_ * groups_; }
  int64_t chunks() const { return chunks_; }
  int64_t chunk(int64_t task) const { return task / groups_; }
  int64_t first_head(int64_t task) const { return task % groups_ * group_; }
  int64_t end_head(int64_t task) const { return std::min(heads_.count, first_head(task) + group_); }

  // Calls run(begin, end) for the stretches of neighbouring rows of x that a task is made of.
  template <class Run>
  void for_each_stretch(int64_t task, Run run) const {
    const int64_t first = first_head(task), last = end_head(task) - 1, inner = heads_.inner;
    const int64_t end = std::min(rows_of_head_, (chunk(task) + 1) * step_);
    const auto row = [&](int64_t k, int64_t head) { return (k / inner * heads_.count + head) * inner + k % inner; };
    for (int64_t k = chunk(task) * step_, length; k < end; k += length) {
      const int64_t whole = k % inner == 0 ? (end - k) / inner : 0;
      length = whole == 0 ? std::min(end - k, inner - k % inner) : group_ == heads_.count ? whole * inner : inner;
      if (whole > 0) {
        run(row(k, first), row(k + length - 1, last) + 1);
      } else {
        for (int64_t head = first; head <= last; ++head) run(row(k, head), row(k, head) + length);
      }
    }
  }

 private:
  RowMap heads_;
  int64_t step_, rows_of_head_, chunks_, group_, groups_;
};

// Rows of f32 sums, one for each chunk of rows, added up as a tree of fixed shape: which thread ran what does not show,
// and the error hardly grows with the number of rows.
class RowSums {
 public:
  RowSums(Output output, const Tasks& tasks, RowMap weight_rows, int64_t cols)
      : output_(output), tasks_(tasks), count_(tasks.chunks()), cols_(cols), width_(weight_rows.count * cols) {
    if (!output_) return;
    data_.reset(new float[count_ * width_]);
    expect_writes({data_.get(), Dtype::f32}, count_ * width_);
  }

  // The row of a task, in which its heads' sums are zero.
  float* zeroed(int64_t task) {
    if (!output_) return nullptr;
    float* const row = data_.get() + tasks_.chunk(task) * width_;
    const int64_t first = tasks_.first_head(task), end = tasks_.end_head(task);
    std::memset(row + first * cols_, 0, (end - first) * cols_ * sizeof(float));
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
          kernels().add(data_.get() + row * width_, data_.get() + first * width_, width_);
        }
      });
    }
    for_each_block(parallel_for, width_, [&](int64_t begin, int64_t end) {
      char* const data = static_cast<char*>(output_.data) + begin * size_of(output_.dtype);
      kernels().cast(data_.get() + begin, {data, output_.dtype}, end - begin);
    });
  }

 private:
  Output output_;
  const Tasks& tasks_;
  int64_t count_, cols_, width_;
  std::unique_ptr<float[]> data_;
};

// A weight as the kernels want it.
class F32Weight {
 public:
  F32Weight(Input* weight, float offset, int64_t count, const ParallelFor& parallel_for) {
    if (!*weight || (weight->dtype == Dtype::f32 && offset == 0)) return;
    data_.reset(new float[count]);
    for_each_block(parallel_for, count, [&](int64_t begin, int64_t end) {
      const char* const data = static_cast<const char*>(weight->data) + begin * size_of(weight->dtype);
      kernels().widen({data, weight->dtype}, offset, data_.get() + begin, end - begin);
    });
    *weight = {data_.get(), Dtype::f32};
  }

 private:
  std::unique_ptr<float[]> data_;
};

}  // namespace

const char* isa() { return kernels().isa; }

void forward(const Forward& call, const ParallelFor& parallel_for) {
  Forward f = call;
  const int64_t weights = f.weight_rows.count * f.cols;
  const F32Weight scale(&f.scale, f.scale_offset, weights, parallel_for), bias(&f.bias, 0, weights, parallel_for);
  const F32Weight smooth(&f.quantized.smooth, 0, f.cols, parallel_for);
  const int64_t step = std::max<int64_t>(1, kElements / f.cols), elements = f.rows * f.cols;
  const int64_t sum_size = f.sum ? size_of(f.sum.dtype) : 0;
  const Output result = f.y ? f.y : f.quantized.values;
  const int64_t gate_size = f.gate ? size_of(f.gate.data.dtype) : 0;
  const int64_t traffic = elements * (size_of(f.x.dtype) + gate_size + 2 * sum_size + size_of(result.dtype));
  expect_writes(result, f.rows * (f.cols + f.y_pad));
  expect_writes(f.sum, elements);
  parallel_for(ceil_div(f.rows, step),
               [&](int64_t task) { kernels().forward(f, task * step, std::min(f.rows, (task + 1) * step), traffic); });
}

void backward(const Backward& call, const ParallelFor& parallel_for) {
  Backward b = call;
  const F32Weight scale(&b.scale, b.scale_offset, b.weight_rows.count * b.cols, parallel_for);
  const Tasks tasks(b, /*with_sums=*/b.dscale || b.dbias);
  const int64_t elements = b.rows * b.cols, of_x = b.gate ? 4 : b.dsum ? 3 : 2;  // arrays of x's dtype
  const int64_t traffic = elements * (of_x * size_of(b.x.dtype) + size_of(b.dy.dtype));
  expect_writes(b.dx, elements);
  expect_writes(b.dgate, elements);
  RowSums dscale(b.dscale, tasks, b.weight_rows, b.cols), dbias(b.dbias, tasks, b.weight_rows, b.cols);
  parallel_for(tasks.count(), [&](int64_t task) {
    float *const of_scale = dscale.zeroed(task), *const of_bias = dbias.zeroed(task);
    tasks.for_each_stretch(
        task, [&](int64_t begin, int64_t end) { kernels().backward(b, begin, end, of_scale, of_bias, traffic); });
  });
  dscale.finish(parallel_for);
  dbias.finish(parallel_for);
}

}  // namespace jaxnorm::cpu
