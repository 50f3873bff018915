// What launches are made of: the instruction set, how rows are shared out among threads, weights as kernels want them,
// and sums over rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "operands.h"

#if defined(__unix__)
#include <sys/mman.h>
#endif

namespace jaxnorm::cpu {

// Kernels are compiled once for each instruction set, and chosen among at run time.
//
// The kernels of an op are a struct of pointers to functions with a constant for each instruction set,
//
//   struct Kernels {
//     static const Kernels baseline, avx2, avx512;
//     ...
//   };
//
// of which a source compiled for one defines its own, Kernels::JAXNORM_ISA. What such a source has for all of them, as
// the launches, stands in it behind `#ifdef JAXNORM_ONCE`: compiled for the baseline, which every processor runs.
enum class Isa { baseline, avx2, avx512 };

// The one that this processor's kernels were compiled for, and its name.
Isa isa();
const char* isa_name();

template <class Kernels>
const Kernels& kernels() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return Kernels::avx512;
  if (isa() == Isa::avx2) return Kernels::avx2;
#endif
  return Kernels::baseline;
}

// The elements that are one task: enough to be worth handing to another thread.
inline constexpr int64_t kTaskElements = 1 << 15;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls task(begin, end) for blocks of `step` neighbours among `count`.
template <class Task>
void for_each_block(const ParallelFor& parallel_for, int64_t count, int64_t step, Task task) {
  parallel_for(ceil_div(count, step), [&](int64_t block) { task(block * step, std::min(count, (block + 1) * step)); });
}

template <class Task>
void for_each_block(const ParallelFor& parallel_for, int64_t count, Task task) {
  for_each_block(parallel_for, count, kTaskElements, task);
}

// Calls task(begin, end) for blocks of neighbouring rows.
template <class Task>
void for_each_rows(const ParallelFor& parallel_for, int64_t rows, int64_t cols, Task task) {
  for_each_block(parallel_for, rows, std::max<int64_t>(1, kTaskElements / cols), task);
}

// For tasks that allocate: that there is no memory is said by whoever handed them out, since a thread of a pool could
// only end the program.
inline ParallelFor for_tasks_that_allocate(const ParallelFor& parallel_for) {
  return [&](int64_t count, const std::function<void(int64_t)>& task) {
    std::atomic<bool> has_memory{true};
    parallel_for(count, [&](int64_t i) {
      try {
        task(i);
      } catch (const std::bad_alloc&) {
        has_memory = false;
      }
    });
    if (!has_memory) throw std::bad_alloc();
  };
}

// Room for what a task keeps of rows: on the heap, since a thread may have a small stack.
inline std::unique_ptr<float[]> room_for(int64_t floats) {
  return std::unique_ptr<float[]>(floats > 0 ? new float[floats] : nullptr);
}

// Room for one row at a time, or for the short ones that go together.
constexpr int64_t kShortFloats = 1 << 11;
inline int64_t floats_of_rows(int64_t cols) { return std::max(cols, kShortFloats); }

// Calls task(begin, end, room) for blocks of neighbouring rows, with room of so many floats.
template <class Task>
void for_each_rows_with_room(const ParallelFor& threads, int64_t rows, int64_t cols, int64_t floats, Task task) {
  for_each_rows(for_tasks_that_allocate(threads), rows, cols,
                [&](int64_t begin, int64_t end) { task(begin, end, room_for(floats).get()); });
}

// Asks for large pages under a large output. XLA hands it over untouched, and to fault it in by 4 KiB takes several
// times as long as to compute it. A refusal is no error.
inline void expect_writes([[maybe_unused]] Output output, [[maybe_unused]] int64_t elements) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 1 << 21;
  const uintptr_t data = reinterpret_cast<uintptr_t>(output.data);
  const uintptr_t begin = (data + kPage - 1) & -kPage;
  const uintptr_t end = (data + elements * size_of(output.dtype)) & -kPage;
  if (output && end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Elementwise, of `count` neighbours in an array.
struct ArrayKernels {
  static const ArrayKernels baseline, avx2, avx512;

  void (*add)(const float* from, float* into, int64_t count);
  void (*cast)(const float* from, Output into, int64_t count);
  void (*widen)(Input from, float offset, float* into, int64_t count);  // writes from + offset
};

// A weight as the kernels want it: f32, with its offset in it. Replaces *weight, where it is not so already, for as
// long as this lives.
class F32Weight {
 public:
  F32Weight(Input* weight, float offset, int64_t count, const ParallelFor& parallel_for) {
    if (!*weight || (weight->dtype == Dtype::f32 && offset == 0)) return;
    data_.reset(new float[count]);
    for_each_block(parallel_for, count, [&](int64_t begin, int64_t end) {
      const char* const data = static_cast<const char*>(weight->data) + begin * size_of(weight->dtype);
      kernels<ArrayKernels>().widen({data, weight->dtype}, offset, data_.get() + begin, end - begin);
    });
    *weight = {data_.get(), Dtype::f32};
  }

 private:
  std::unique_ptr<float[]> data_;
};

// Which rows are a task. Row k of head h, a row of weights, is row (k / inner * count + h) * inner + k % inner of x; a
// task has the same `step` rows of each of `group` neighbouring heads. Without sums over rows all rows are of one head.
class GradTasks {
 public:
  GradTasks(int64_t rows, int64_t cols, RowMap weight_rows, bool with_sums)
      : heads_(with_sums ? weight_rows : RowMap{}) {
    // Each task costs a row of sums: at least 8 rows share one, so that sums cost little memory; at most 512, so that
    // they stay accurate.
    constexpr int64_t kElements = 1 << 17;
    step_ = with_sums ? std::clamp<int64_t>(kElements / (cols * heads_.count), 8, 512)
                      : std::max<int64_t>(1, kTaskElements / cols);
    if (heads_.count == 1) heads_.inner = std::max<int64_t>(1, rows);
    rows_of_head_ = rows / heads_.count;
    chunks_ = std::max<int64_t>(1, ceil_div(rows_of_head_, step_));  // no rows: the sums are zero
    group_ = std::clamp<int64_t>(kElements / cols / std::clamp<int64_t>(rows_of_head_, 1, step_), 1, heads_.count);
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

// The gradient of a weight: rows of f32 sums, one for each chunk of rows, added up as a tree of fixed shape: which
// thread ran what does not show, and the error hardly grows with the number of rows.
class WeightGrad {
 public:
  WeightGrad(Output output, const GradTasks& tasks, RowMap weight_rows, int64_t cols)
      : output_(output), tasks_(tasks), count_(tasks.chunks()), cols_(cols), width_(weight_rows.count * cols) {
    if (!output_) return;
    data_.reset(new float[count_ * width_]);
    expect_writes({data_.get(), Dtype::f32}, count_ * width_);
  }

  // The row of a task, in which its heads' sums are zero; null where the gradient is not wanted.
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
      for_each_block(parallel_for, count_, stride * kFan, [&](int64_t first, int64_t end) {
        for (int64_t row = first + stride; row < end; row += stride) {
          kernels<ArrayKernels>().add(data_.get() + row * width_, data_.get() + first * width_, width_);
        }
      });
    }
    for_each_block(parallel_for, width_, [&](int64_t begin, int64_t end) {
      char* const data = static_cast<char*>(output_.data) + begin * size_of(output_.dtype);
      kernels<ArrayKernels>().cast(data_.get() + begin, {data, output_.dtype}, end - begin);
    });
  }

 private:
  Output output_;
  const GradTasks& tasks_;
  int64_t count_, cols_, width_;
  std::unique_ptr<float[]> data_;
};

// Calls rows(begin, end, dscale, dbias, room), which adds to rows of sums and has room for so many floats, for all rows
// of a backward `p`, and finishes the sums in dscale and dbias.
template <class Op, class RowsFunction>
void for_each_grad_rows(const ParallelFor& threads, const Op& p, Output dscale, Output dbias, int64_t floats,
                        RowsFunction rows) {
  const ParallelFor parallel_for = for_tasks_that_allocate(threads);
  const GradTasks tasks(p.rows, p.cols, p.weight_rows, /*with_sums=*/dscale || dbias);
  WeightGrad scale(dscale, tasks, p.weight_rows, p.cols), bias(dbias, tasks, p.weight_rows, p.cols);
  parallel_for(tasks.count(), [&](int64_t task) {
    float *const scale_sums = scale.zeroed(task), *const bias_sums = bias.zeroed(task);
    const auto room = room_for(floats);
    tasks.for_each_stretch(task,
                           [&](int64_t begin, int64_t end) { rows(begin, end, scale_sums, bias_sums, room.get()); });
  });
  scale.finish(parallel_for);
  bias.finish(parallel_for);
}

}  // namespace jaxnorm::cpu
