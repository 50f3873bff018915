// The launches of GroupNorm, and what is made of the sums of its tiles: double, and little work beside them.
#include <cmath>

#include "engine/cpu/launch.h"
#include "ops/group_norm/cpu/group_tiles.h"

namespace jaxnorm::cpu {
namespace {

// Both directions: what is a value for each group, for its columns.
class GroupOp {
 public:
  GroupOp(const Groups& p, const GroupWeight& scale, const GroupWeight& bias)
      : groups_(p),
        tiles_(p),
        scale_(scale, 1, p.channels(), tiles_.copies()),
        bias_(bias, -0.f, p.channels(), tiles_.copies()) {}

  const GroupTiles& tiles() const { return tiles_; }

 protected:
  GroupSlot slot(int sums, int arrays) const { return {tiles_, groups_.channels(), sums, arrays}; }

  void begin_weights(int64_t example, float* scale, float* bias) const {
    scale_.begin(example, scale);
    bias_.begin(example, bias);
  }

  int64_t channel(int64_t group) const { return group * groups_.group_size; }
  double group_elements() const { return static_cast<double>(groups_.positions * groups_.group_size); }

  void set_columns(float* columns, int64_t group, float value) const {
    for (int64_t i = 0; i < tiles_.copies(); ++i)
      std::fill_n(columns + i * groups_.channels() + channel(group), groups_.group_size, value);
  }

  // Calls f(tile, rows, column) where the first of the columns begin that have all channels.
  template <class F>
  void for_each_copy(F f) const {
    for (int64_t index = 0; index < tiles_.count(); ++index) {
      const GroupTile tile = tiles_.tile(0, index);
      for (int64_t column = 0; column < tile.cols; column += groups_.channels()) f(index, tile.rows, column);
    }
  }

  const Groups& groups_;
  GroupTiles tiles_;
  ColumnWeight scale_, bias_;
};

class GroupForward : public GroupOp {
 public:
  GroupForward(const GroupNormForward& p, int64_t traffic) : GroupOp(p, p.scale, p.bias), p_(p), traffic_(traffic) {}

  GroupSlot slot() const { return GroupOp::slot(3, 5); }

  void begin(const GroupSlot& slot, int64_t example) const { begin_weights(example, slot.columns(3), slot.columns(4)); }

  void sum(const GroupSlot& slot, int64_t example, int64_t tile) const {
    kernels<GroupNormKernels>().moments(p_.x, tiles_.tile(example, tile), moments(slot, tile));
  }

  // First the means of groups, and then the squares around them: Chan, Golub and LeVeque's merge of all at once.
  void merge(const GroupSlot& slot, int64_t example) const {
    const int64_t channels = p_.channels();
    double *const centre = slot.channels(), *const sums = centre + channels;
    std::fill_n(sums, channels, 0.);
    for_each_copy([&](int64_t tile, int64_t rows, int64_t column) {
      const auto [mean, rest, m2] = moments(slot, tile, column);
      for (int64_t c = 0; c < channels; ++c) sums[c] += rows * (static_cast<double>(mean[c]) + rest[c]);
    });
    for (int64_t group = 0; group < p_.groups; ++group)
      std::fill_n(centre + channel(group), p_.group_size, mean_of(sums, group));
    std::fill_n(sums, channels, 0.);
    for_each_copy([&](int64_t tile, int64_t rows, int64_t column) {
      const auto [mean, rest, m2] = moments(slot, tile, column);
      for (int64_t c = 0; c < channels; ++c) {
        const double d = static_cast<double>(mean[c]) - centre[c] + rest[c];
        sums[c] += m2[c] + rows * d * d;
      }
    });
    for (int64_t group = 0; group < p_.groups; ++group)
      save(slot, example, group, centre[channel(group)], mean_of(sums, group));
  }

  void write(const GroupSlot& slot, int64_t example, int64_t tile) const {
    const GroupColumns columns{slot.columns(0),
                               slot.columns(1),
                               scale_.of(example, slot.columns(3)),
                               bias_.of(example, slot.columns(4)),
                               slot.columns(2),
                               nullptr,
                               nullptr};
    kernels<GroupNormKernels>().forward(p_, tiles_.tile(example, tile), columns, traffic_);
  }

 private:
  GroupMoments moments(const GroupSlot& slot, int64_t tile, int64_t column = 0) const {
    return {slot.tile(tile, 0) + column, slot.tile(tile, 1) + column, slot.tile(tile, 2) + column};
  }

  double mean_of(const double* sums, int64_t group) const {
    double sum = 0;
    for (int64_t c = channel(group); c < channel(group + 1); ++c) sum += sums[c];
    return sum / group_elements();
  }

  // As Layer, see stats.h.
  void save(const GroupSlot& slot, int64_t example, int64_t group, double exact, double variance) const {
    const double exact_rstd = 1 / std::sqrt((variance < 0 ? 0 : variance) + p_.epsilon);
    const float mean = exact, rstd = exact_rstd;
    set_columns(slot.columns(0), group, mean);
    set_columns(slot.columns(1), group, rstd);
    set_columns(slot.columns(2), group, std::isinf(rstd) ? -0.f : static_cast<float>((mean - exact) * exact_rstd));
    if (!p_.rstd) return;
    p_.mean[example * p_.groups + group] = mean;
    p_.rstd[example * p_.groups + group] = rstd;
  }

  const GroupNormForward& p_;
  int64_t traffic_;
};

class GroupBackward : public GroupOp {
 public:
  GroupBackward(const GroupNormBackward& p, int64_t block, int64_t traffic)
      : GroupOp(p, p.scale, p.bias),
        p_(p),
        traffic_(traffic),
        dscale_(p.dscale, p.scale.map, p, block),
        dbias_(p.dbias, p.bias.map, p, block) {}

  GroupSlot slot() const { return GroupOp::slot(2, 6); }

  void begin(const GroupSlot& slot, int64_t example) const {
    begin_weights(example, slot.columns(4), slot.columns(5));
    for (int64_t group = 0; group < p_.groups; ++group) {
      set_columns(slot.columns(0), group, p_.mean[example * p_.groups + group]);
      set_columns(slot.columns(1), group, p_.rstd[example * p_.groups + group]);
    }
  }

  void sum(const GroupSlot& slot, int64_t example, int64_t tile) const {
    kernels<GroupNormKernels>().sums(p_, tiles_.tile(example, tile), columns(slot, example), sums(slot, tile));
  }

  // The sums over a channel are of dz and dz * x_hat; those of g and g * x_hat over a group are its scales by these.
  void merge(const GroupSlot& slot, int64_t example) {
    const int64_t channels = p_.channels();
    double *const dz = slot.channels(), *const dz_x_hat = dz + channels;
    std::fill_n(dz, 2 * channels, 0.);
    for_each_copy([&](int64_t tile, int64_t, int64_t column) {
      const auto [tile_dz, tile_dz_x_hat] = sums(slot, tile, column);
      for (int64_t c = 0; c < channels; ++c) {
        dz[c] += tile_dz[c];
        dz_x_hat[c] += tile_dz_x_hat[c];
      }
    });
    dscale_.add(example, dz_x_hat);
    dbias_.add(example, dz);
    if (!p_.dx) return;
    const float* const scale = columns(slot, example).scale;
    for (int64_t group = 0; group < p_.groups; ++group) {
      double g = 0, g_x_hat = 0;
      for (int64_t c = channel(group); c < channel(group + 1); ++c) {
        g += scale[c] * dz[c];
        g_x_hat += scale[c] * dz_x_hat[c];
      }
      set_columns(slot.columns(2), group, g / group_elements());
      set_columns(slot.columns(3), group, -g_x_hat / group_elements());
    }
  }

  void write(const GroupSlot& slot, int64_t example, int64_t tile) const {
    if (p_.dx) kernels<GroupNormKernels>().backward(p_, tiles_.tile(example, tile), columns(slot, example), traffic_);
  }

  void finish(const ParallelFor& parallel_for) {
    dscale_.finish(parallel_for);
    dbias_.finish(parallel_for);
  }

 private:
  GroupGradSums sums(const GroupSlot& slot, int64_t tile, int64_t column = 0) const {
    return {slot.tile(tile, 0) + column, slot.tile(tile, 1) + column};
  }

  GroupColumns columns(const GroupSlot& slot, int64_t example) const {
    return {slot.columns(0),
            slot.columns(1),
            scale_.of(example, slot.columns(4)),
            bias_.of(example, slot.columns(5)),
            nullptr,
            slot.columns(2),
            slot.columns(3)};
  }

  const GroupNormBackward& p_;
  int64_t traffic_;
  GroupWeightGrad dscale_, dbias_;
};

GroupWeight of_example(const GroupWeight& weight, int64_t example, int64_t channels) {
  GroupWeight row = weight;
  if (weight) row.data = static_cast<const float*>(weight.data) + weight.map.row(example) * channels;
  return row;
}

// Without positions there is nothing to sum up for a column.
void forward_rows(const GroupNormForward& p, const ParallelFor& parallel_for, int64_t traffic) {
  const bool is_same = is_same_for_all(p.scale.map) && is_same_for_all(p.bias.map);
  for_each_rows(parallel_for, p.examples, p.channels(), [&](int64_t begin, int64_t end) {
    if (is_same) return kernels<GroupNormKernels>().rows(p, begin * p.groups, end * p.groups, traffic);
    GroupNormForward one = p;
    for (int64_t example = begin; example < end; ++example) {
      one.scale = of_example(p.scale, example, p.channels());
      one.bias = of_example(p.bias, example, p.channels());
      kernels<GroupNormKernels>().rows(one, example * p.groups, (example + 1) * p.groups, traffic);
    }
  });
}

}  // namespace

void run(const GroupNormForward& call, const ParallelFor& threads) {
  if (call.examples == 0) return;
  const ParallelFor parallel_for = for_tasks_that_allocate(threads);
  GroupNormForward p = call;
  const F32Weight scale(&p.scale, p.scale_offset, rows_of(p.scale.map, p.examples) * p.channels(), parallel_for);
  const F32Weight bias(&p.bias, 0, rows_of(p.bias.map, p.examples) * p.channels(), parallel_for);
  const int64_t elements = p.examples * p.positions * p.channels(), x_size = size_of(p.x.dtype);
  expect_writes(p.y, elements);
  const int64_t traffic = elements * (x_size + size_of(p.y.dtype));
  if (p.positions == 1) return forward_rows(p, parallel_for, traffic);
  GroupForward op(p, traffic);
  GroupSchedule(p, op.tiles(), x_size).run(parallel_for, op);
}

void run(const GroupNormBackward& call, const ParallelFor& threads) {
  const ParallelFor parallel_for = for_tasks_that_allocate(threads);
  GroupNormBackward p = call;
  const F32Weight scale(&p.scale, p.scale_offset, rows_of(p.scale.map, p.examples) * p.channels(), parallel_for);
  const F32Weight bias(&p.bias, 0, rows_of(p.bias.map, p.examples) * p.channels(), parallel_for);
  const int64_t elements = p.examples * p.positions * p.channels();
  const int64_t x_size = size_of(p.x.dtype), dy_size = size_of(p.dy.dtype);
  expect_writes(p.dx, elements);
  const GroupTiles tiles(p);
  const GroupSchedule schedule(p, tiles, x_size + dy_size);
  GroupBackward op(p, schedule.block(), elements * (2 * x_size + dy_size));
  schedule.run(parallel_for, op);
  op.finish(parallel_for);
}

}  // namespace jaxnorm::cpu
