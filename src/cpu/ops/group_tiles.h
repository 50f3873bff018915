// How the examples of GroupNorm are cut up into tiles, and how these are shared out among threads.
#pragma once

#include <algorithm>
#include <memory>

#include "cpu/engine/parallel.h"
#include "cpu/ops/group_tile.h"
#include "ops/group_norm.h"

namespace jaxnorm::cpu {

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
//   op.sum(slot, example, tile)             for each tile
//   op.merge(slot, example, group, end)     for all groups, some at a time
//   op.write(slot, example, tile)           for each tile
//
// The second time a tile is read it comes from a cache, if the caches hold an example. Which threads work on an example
// changes none of its bits.
class GroupSchedule {
 public:
  GroupSchedule(const Groups& p, const GroupTiles& tiles, int64_t bytes_an_element)
      : p_(p), tiles_(tiles), bytes_(tiles.elements() * bytes_an_element) {
    // Sums over examples have a row for each block of them; at least 8 positions share one, so that they cost little
    // memory.
    constexpr int64_t kLeast = 8, kMost = 256;
    block_ = std::max(ceil_div(kLeast, p.positions), std::min(kMost, kTaskElements / tiles.elements()));
  }

  int64_t block() const { return block_; }

  template <class Op>
  void run(const ParallelFor& parallel_for, Op& op) const {
    constexpr int64_t kMany = 16, kBytes = 1 << 20;  // enough examples for all threads, each of its own
    if (block_ > 1 || (p_.examples >= kMany && bytes_ <= kBytes) || tiles_.count() == 1) {
      for_each_block(parallel_for, p_.examples, block_, [&](int64_t begin, int64_t end) { run_alone(op, begin, end); });
      return;
    }
    constexpr int64_t kRound = 8 << 20;  // what all threads together find in the cache again
    const int64_t step = std::clamp<int64_t>(kRound / bytes_, 1, std::max<int64_t>(1, p_.examples));
    const std::unique_ptr<GroupSlot[]> slots = op.slots(step);
    for (int64_t first = 0; first < p_.examples; first += step)
      run_together(parallel_for, op, slots.get(), first, std::min(step, p_.examples - first));
  }

 private:
  template <class Op>
  void run_alone(Op& op, int64_t begin, int64_t end) const {
    const std::unique_ptr<GroupSlot[]> slot = op.slots(1);
    for (int64_t example = begin; example < end; ++example) {
      op.begin(slot[0], example);
      for (int64_t tile = 0; tile < tiles_.count(); ++tile) op.sum(slot[0], example, tile);
      op.merge(slot[0], example, 0, p_.groups);
      for (int64_t tile = 0; tile < tiles_.count(); ++tile) op.write(slot[0], example, tile);
    }
  }

  template <class Op>
  void run_together(const ParallelFor& parallel_for, Op& op, const GroupSlot* slots, int64_t first,
                    int64_t count) const {
    const int64_t tiles = tiles_.count();
    for (int64_t i = 0; i < count; ++i) op.begin(slots[i], first + i);
    parallel_for(count * tiles, [&](int64_t i) { op.sum(slots[i / tiles], first + i / tiles, i % tiles); });
    const int64_t sums_a_group = tiles * tiles_.cols() / p_.groups;
    const int64_t step = std::clamp<int64_t>(kTaskElements / std::max<int64_t>(1, sums_a_group), 1, p_.groups);
    const int64_t parts = ceil_div(p_.groups, step);
    parallel_for(count * parts, [&](int64_t i) {
      const int64_t group = i % parts * step;
      op.merge(slots[i / parts], first + i / parts, group, std::min(p_.groups, group + step));
    });
    parallel_for(count * tiles, [&](int64_t i) { op.write(slots[i / tiles], first + i / tiles, i % tiles); });
  }

  const Groups& p_;
  const GroupTiles& tiles_;
  int64_t bytes_, block_;
};

}  // namespace jaxnorm::cpu
