// The weights of GroupNorm, and the sums over examples that are their gradients.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "engine/cpu/launch.h"
#include "ops/group_norm/cpu/group_tiles.h"

namespace jaxnorm::cpu {

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
