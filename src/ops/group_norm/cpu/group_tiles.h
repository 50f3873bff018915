// How the examples of GroupNorm are cut up into tiles, the kernels of a tile, how tiles are shared out among threads,
// and the weights of their columns.
//
// The kernels know neither groups nor examples: what is summed up is summed up for each column of a tile, and what
// differs between channels comes as an array with a value for each column.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "engine/cpu/launch.h"
#include "ops/group_norm/call.h"

namespace jaxnorm::cpu {

// Neighbouring elements of one example: rows of the channels of a position each or, where those are few, of several
// neighbouring positions.
struct GroupTile {
  int64_t begin, rows, cols;  // begin: the first element in x
};

// The sums over the rows of a tile, a value for each column.
struct GroupMoments {
  float *mean, *rest, *m2;  // mean + rest is the mean, to more than a float holds; m2 the sum of squared deviations
};
struct GroupGradSums {
  float *dz, *dz_x_hat;
};

// A value for each column. Without a scale or a bias there is the constant that changes no bit.
struct GroupColumns {
  const float *mean, *rstd, *scale, *bias;
  const float* shift;                        // forward: what x_hat lacks since mean is rounded
  const float *mean_g, *minus_mean_g_x_hat;  // backward
};

// `traffic` is how many bytes all rows of the call read and write.
struct GroupNormKernels {
  static const GroupNormKernels baseline, avx2, avx512;

  // Of groups [begin, end) without positions, with weights that are the same for all examples.
  void (*rows)(const GroupNormForward& p, int64_t begin, int64_t end, int64_t traffic);
  // Of a tile.
  void (*moments)(Input x, const GroupTile& tile, const GroupMoments& moments);
  void (*forward)(const GroupNormForward& p, const GroupTile& tile, const GroupColumns& columns, int64_t traffic);
  void (*sums)(const GroupNormBackward& p, const GroupTile& tile, const GroupColumns& columns,
               const GroupGradSums& sums);
  void (*backward)(const GroupNormBackward& p, const GroupTile& tile, const GroupColumns& columns, int64_t traffic);
};

inline int64_t greatest_common_divisor(int64_t a, int64_t b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }

// The tiles of an example. They follow from its shape alone, and so do its bits.
class GroupTiles {
 public:
  explicit GroupTiles(const Groups& p) : elements_(p.positions * p.channels()), channels_(p.channels()) {
    // Rows of at least kLeast columns that are a multiple of every vector's length.
    constexpr int64_t kLeast = 256, kVector = 16;
    if (channels_ < kLeast) {
      const int64_t step = kVector / greatest_common_divisor(channels_, kVector);
      fold_ = std::min(p.positions, ceil_div(kLeast, channels_ * step) * step);
    }
    // A tile of so few elements lies in the second-level cache when it is read again; of so many rows that to merge
    // what is summed up for each column is little beside the sums.
    constexpr int64_t kElements = 1 << 15, kLeastRows = 32;
    rows_ = p.positions / fold_;
    step_ = std::min(rows_, std::max(kLeastRows, kElements / cols()));
    count_ = ceil_div(rows_, step_) + (p.positions % fold_ ? 1 : 0);
  }

  int64_t count() const { return count_; }
  int64_t elements() const { return elements_; }
  int64_t cols() const { return fold_ * channels_; }  // of all tiles but the last, which may have less
  int64_t copies() const { return fold_; }            // of the channels among the columns

  GroupTile tile(int64_t example, int64_t index) const {
    const int64_t row = std::min(rows_, index * step_), begin = example * elements_ + row * cols();
    if (row == rows_) return {begin, 1, elements_ - row * cols()};
    return {begin, std::min(step_, rows_ - row), cols()};
  }

 private:
  int64_t elements_, channels_, fold_ = 1, rows_, step_, count_;
};

// What is kept of one example while it is worked on.
class GroupSlot {
 public:
  GroupSlot() = default;

  // `sums` and `arrays`: how many numbers are kept for each column of each tile, and of the example.
  GroupSlot(const GroupTiles& tiles, int64_t channels, int sums, int arrays)
      : cols_(tiles.cols()),
        sums_(sums),
        tiles_(new float[tiles.count() * sums * cols_]),
        columns_(new float[arrays * cols_]),
        channels_(new double[2 * channels]) {}

  float* tile(int64_t index, int which) const { return tiles_.get() + (index * sums_ + which) * cols_; }
  float* columns(int which) const { return columns_.get() + which * cols_; }
  double* channels() const { return channels_.get(); }

 private:
  int64_t cols_ = 0;
  int sums_ = 0;
  std::unique_ptr<float[]> tiles_, columns_;
  std::unique_ptr<double[]> channels_;
};

// Calls for each example, with a slot that the op makes,
//
//   op.begin(slot, example)
//   op.sum(slot, example, tile)      for each tile, perhaps on several threads
//   op.merge(slot, example)
//   op.write(slot, example, tile)    for each tile, perhaps on several threads
//
// The second time a tile is read it comes from a cache, if the caches hold an example. Which threads work on an example
// changes none of its bits.
class GroupSchedule {
 public:
  GroupSchedule(const Groups& p, const GroupTiles& tiles, int64_t bytes_an_element)
      : examples_(p.examples), tiles_(tiles.count()), bytes_(tiles.elements() * bytes_an_element) {
    // Sums over examples have a row for each block of them; at least 8 positions share one, so that they cost little
    // memory.
    constexpr int64_t kLeast = 8, kMost = 256;
    block_ = std::max(ceil_div(kLeast, p.positions), std::min(kMost, kTaskElements / tiles.elements()));
  }

  int64_t block() const { return block_; }

  template <class Op>
  void run(const ParallelFor& parallel_for, Op& op) const {
    constexpr int64_t kMany = 16, kBytes = 1 << 20;  // enough examples for all threads, each of its own
    if (block_ > 1 || tiles_ == 1 || (examples_ >= kMany && bytes_ <= kBytes)) {
      for_each_block(parallel_for, examples_, block_, [&](int64_t begin, int64_t end) { run_alone(op, begin, end); });
    } else {
      run_together(parallel_for, op);
    }
  }

 private:
  template <class Op>
  void run_alone(Op& op, int64_t begin, int64_t end) const {
    const GroupSlot slot = op.slot();
    for (int64_t example = begin; example < end; ++example) {
      op.begin(slot, example);
      for (int64_t tile = 0; tile < tiles_; ++tile) op.sum(slot, example, tile);
      op.merge(slot, example);
      for (int64_t tile = 0; tile < tiles_; ++tile) op.write(slot, example, tile);
    }
  }

  // All threads work on one example after the other, and write one when they have summed up some more: then they need
  // not wait for each other where one of them is slow.
  template <class Op>
  void run_together(const ParallelFor& parallel_for, Op& op) const {
    constexpr int64_t kCached = 16 << 20;  // what all threads together find in the cache again
    const int64_t lag = std::clamp<int64_t>(kCached / bytes_ - 1, examples_ > 1, 16);
    const int64_t count = lag + 3, a_step = 1 + 2 * tiles_;  // see below
    const std::unique_ptr<GroupSlot[]> slots(new GroupSlot[count]);
    for (int64_t i = 0; i < count; ++i) slots[i] = op.slot();
    const std::unique_ptr<Progress[]> progress(new Progress[examples_ + 1]);
    const auto start = [&](int64_t example) {
      if (example >= examples_) return;
      if (example >= count) progress[example - count].written.wait_for(tiles_);
      op.begin(slots[example % count], example);
      progress[example].begun.add();
    };
    const auto sum = [&](int64_t example, int64_t tile) {
      if (example >= examples_) return;
      progress[example].begun.wait_for(1);
      const GroupSlot& slot = slots[example % count];
      op.sum(slot, example, tile);
      if (progress[example].summed.add() < tiles_) return;
      op.merge(slot, example);
      progress[example].merged.add();
    };
    const auto write = [&](int64_t example, int64_t tile) {
      if (example < 0) return;
      progress[example].merged.wait_for(1);
      op.write(slots[example % count], example, tile);
      progress[example].written.add();
    };
    // Each item waits only for earlier ones, which other threads have begun when it is drawn: this cannot deadlock in
    // whatever order tasks are run. Step k begins example k + 1, sums up k, and writes k - lag.
    start(0);
    std::atomic<int64_t> next{0};
    parallel_for((examples_ + lag) * a_step, [&](int64_t) {
      const int64_t item = next.fetch_add(1, std::memory_order_relaxed), step = item / a_step, part = item % a_step;
      if (part == 0) return start(step + 1);
      part <= tiles_ ? sum(step, part - 1) : write(step - lag, part - 1 - tiles_);
    });
  }

  class Counter {
   public:
    int64_t add() { return value_.fetch_add(1, std::memory_order_acq_rel) + 1; }
    void wait_for(int64_t value) const {
      while (value_.load(std::memory_order_acquire) < value) std::this_thread::yield();
    }

   private:
    std::atomic<int64_t> value_{0};
  };

  struct Progress {
    Counter begun, summed, merged, written;
  };

  int64_t examples_, tiles_, bytes_, block_;
};

// How many rows a weight has.
inline int64_t rows_of(const ExampleMap& map, int64_t examples) {
  int64_t rows = 1;
  for (int axis = 0; axis < map.axes; ++axis) {
    // Without examples an axis stands for an empty one if it is 1 long; of others none is.
    if (examples == 0 && map.extent[axis] == 1 && map.stride[axis] != 0) return 0;
    rows += (map.extent[axis] - 1) * map.stride[axis];
  }
  return rows;
}

inline bool is_same_for_all(const ExampleMap& map) {
  return std::all_of(map.stride, map.stride + map.axes, [](int64_t stride) { return stride == 0; });
}

// A weight, f32 here, with a value for each column of a tile.
class ColumnWeight {
 public:
  ColumnWeight(const GroupWeight& weight, float absent, int64_t channels, int64_t copies)
      : data_(static_cast<const float*>(weight.data)), map_(weight.map), channels_(channels), copies_(copies) {
    if (data_ && !is_same_for_all(map_)) return;
    if (data_ && copies == 1) return;
    same_.reset(new float[channels * copies]);
    if (data_) {
      copy(data_, same_.get());
    } else {
      std::fill_n(same_.get(), channels * copies, absent);
    }
  }

  // Has to be called for an example before of(), which may need the room for its values.
  void begin(int64_t example, float* room) const {
    if (!same_ && copies_ > 1) copy(row(example), room);
  }

  const float* of(int64_t example, const float* room) const {
    return same_ ? same_.get() : copies_ > 1 ? room : row(example);
  }

 private:
  const float* row(int64_t example) const { return data_ + map_.row(example) * channels_; }

  void copy(const float* from, float* into) const {
    for (int64_t i = 0; i < copies_; ++i) std::memcpy(into + i * channels_, from, channels_ * sizeof(float));
  }

  const float* data_;
  ExampleMap map_;
  int64_t channels_, copies_;
  std::unique_ptr<float[]> same_;
};

// The gradient of a weight: rows of f32 sums, one for each example, or for each block of them where all have the same
// weight. They are added up in the order of examples: which thread ran what does not show.
class GroupWeightGrad {
 public:
  GroupWeightGrad(Output output, const ExampleMap& map, const Groups& p, int64_t block)
      : output_(output),
        map_(map),
        channels_(p.channels()),
        block_(is_same_for_all(map) ? block : 1),
        count_(ceil_div(p.examples, block_)),
        rows_(rows_of(map, p.examples)) {
    if (output_) data_.reset(new float[count_ * channels_]);
  }

  explicit operator bool() const { return bool{output_}; }

  // Of all channels. Examples of a block come one after the other.
  void add(int64_t example, const double* sums) {
    if (!output_) return;
    float* const row = data_.get() + example / block_ * channels_;
    const bool is_first = example % block_ == 0;
    for (int64_t c = 0; c < channels_; ++c) row[c] = is_first ? sums[c] : row[c] + sums[c];
  }

  void finish(const ParallelFor& parallel_for) {
    if (!output_) return;
    constexpr int64_t kChannels = 128;
    for_each_block(parallel_for, channels_, kChannels, [&](int64_t begin, int64_t end) {
      const int64_t width = end - begin;
      std::vector<double> sums(rows_ * width);
      for (int64_t i = 0; i < count_; ++i) {
        double* const into = sums.data() + map_.row(i * block_) * width;
        const float* const row = data_.get() + i * channels_ + begin;
        for (int64_t j = 0; j < width; ++j) into[j] += row[j];
      }
      float narrow[kChannels];
      for (int64_t row = 0; row < rows_; ++row) {
        std::copy_n(sums.data() + row * width, width, narrow);
        char* const out = static_cast<char*>(output_.data) + (row * channels_ + begin) * size_of(output_.dtype);
        kernels<ArrayKernels>().cast(narrow, {out, output_.dtype}, width);
      }
    });
  }

 private:
  Output output_;
  ExampleMap map_;
  int64_t channels_, block_, count_, rows_;
  std::unique_ptr<float[]> data_;
};

}  // namespace jaxnorm::cpu
