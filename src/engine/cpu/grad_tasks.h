// How the rows of a backward are shared out, and its sums over rows.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "engine/cpu/arrays.h"
#include "engine/cpu/isa.h"
#include "engine/cpu/parallel.h"

namespace jaxnorm::cpu {

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
