// The tiles of GroupNorm, see group_tiles.h.
#include "engine/cpu/columns.h"
#include "engine/cpu/row_loop.h"
#include "engine/cpu/vector.h"
#include "ops/group_norm/cpu/group_tiles.h"
#include "ops/shared/cpu/functions.h"
#include "ops/shared/cpu/rows.h"

namespace jaxnorm::cpu {
namespace {

// Calls f(row, end, column, extent) for vectors of the columns of some rows from `row` to `end`: sums are read and
// written once for all of them.
template <class F>
[[gnu::always_inline]] inline void for_each_vector_to_sum(const GroupTile& tile, F f) {
  constexpr int kRowsTogether = 4;
  const int64_t rows = tile.rows;
  for (int64_t row = 0; row < rows; row += kRowsTogether) {
    const int64_t end = rows - row < kRowsTogether ? rows : row + kRowsTogether;
    for_each_vector(tile.cols, [&](int64_t column, auto extent) { f(row, end, column, extent); });
  }
}

// Calls f(row, column, extent) for vectors in the order in which they lie in memory: a line that is written past the
// caches has to be written at once. What goes with so many columns as come one after the other stays in the first-level
// cache.
template <class F>
[[gnu::always_inline]] inline void for_each_vector_to_write(const GroupTile& tile, F f) {
  constexpr int64_t kColumns = 512;
  const int64_t rows = tile.rows, cols = tile.cols;
  for (int64_t first = 0; first < cols; first += kColumns) {
    const int64_t count = cols - first < kColumns ? cols - first : kColumns;
    for (int64_t row = 0; row < rows; ++row)
      for_each_vector(count, [&](int64_t column, auto extent) { f(row, first + column, extent); });
  }
}

// Two passes, of which the second finds the tile in the cache.
template <class X>
void group_moments(const X* x, const GroupTile& tile, const GroupMoments& moments) {
  float *const mean = moments.mean, *const rest = moments.rest, *const m2 = moments.m2;
  const int64_t cols = tile.cols;
  fill(mean, 0, cols), fill(rest, 0, cols), fill(m2, 0, cols);
  for_each_vector_to_sum(tile, [=](int64_t row, int64_t end, int64_t column, auto extent) {
    Vec sum = load(mean + column, extent);
    for (; row < end; ++row) sum += load(x + row * cols + column, extent);
    store(mean + column, sum, extent);
  });
  const float reciprocal = 1.f / tile.rows;
  for_each_vector(cols, [=](int64_t column, auto extent) {
    store(mean + column, load(mean + column, extent) * reciprocal, extent);
  });
  for_each_vector_to_sum(tile, [=](int64_t row, int64_t end, int64_t column, auto extent) {
    const Vec centre = load(mean + column, extent);
    Vec sum = load(rest + column, extent), square = load(m2 + column, extent);
    for (; row < end; ++row) {
      const Vec d = load(x + row * cols + column, extent) - centre;
      sum += d;
      square = fma(d, d, square);
    }
    store(rest + column, sum, extent);
    store(m2 + column, square, extent);
  });
  // The second pass sums what is left of the mean along with the squares, as in Layer, see stats.h.
  for_each_vector(cols, [=](int64_t column, auto extent) {
    const Vec sum = load(rest + column, extent), left = sum * reciprocal;
    store(rest + column, left, extent);
    store(m2 + column, fma(-sum, left, load(m2 + column, extent)), extent);
  });
}

void group_moments(Input x, const GroupTile& tile, const GroupMoments& moments) {
  with_type(x.dtype,
            [&](auto type) { group_moments(static_cast<const decltype(type)*>(x.data) + tile.begin, tile, moments); });
}

template <class F>
void with_activation(Activation activation, F f) {
  with_one_of<Identity, Silu, Relu, Gelu>(activation, f);
}

template <class A, class X, class Y>
void group_norm(const GroupTile& tile, const GroupColumns& columns, const X* x, const OutputRows<Y>& y) {
  for_each_vector_to_write(tile, [=, cols = tile.cols](int64_t row, int64_t column, auto extent) {
    const Vec d = load(x + row * cols + column, extent) - load(columns.mean + column, extent);
    const Vec x_hat = fma(d, load(columns.rstd + column, extent), load(columns.shift + column, extent));
    const Vec z = fma(x_hat, load(columns.scale + column, extent), load(columns.bias + column, extent));
    y[row](column, A::of(z), extent);
  });
}

void group_norm(const GroupNormForward& p, const GroupTile& tile, const GroupColumns& columns, int64_t traffic) {
  with_types(p.x.dtype, p.y.dtype, [&](auto x_type, auto y_type) {
    using Y = decltype(y_type);
    const auto* const x = static_cast<const decltype(x_type)*>(p.x.data) + tile.begin;
    const OutputRows<Y> y({static_cast<Y*>(p.y.data) + tile.begin, p.y.dtype}, tile.cols, traffic);
    with_activation(p.activation, [&](auto a) { group_norm<decltype(a)>(tile, columns, x, y); });
  });
  fence();
}

// Without positions a group is a row, and groups lie one after the other.
struct GroupRows {
  int64_t cols;
  float epsilon;
  float *mean, *rstd;
};

// An epilogue, for weights that are the same for all examples.
template <class Y, class A>
struct WriteActivated {
  const GroupNormForward& p;
  OutputRows<Y> y;

  template <class X>
  void operator()(int64_t row, Layer stats, RowReader<X> x) const {
    const Affine affine(p.scale, p.bias, row % p.groups * p.group_size);
    const RowWriter<Y> y_row = y[row];
    for_each_vector(p.group_size, [&](int64_t column, auto extent) {
      y_row(column, A::of(affine(stats.x_hat(x(column, extent)), column, extent)), extent);
    });
  }
};

void group_norm_rows(const GroupNormForward& p, int64_t begin, int64_t end, int64_t traffic) {
  const GroupRows rows{p.group_size, p.epsilon, p.mean, p.rstd};
  with_types(p.x.dtype, p.y.dtype, [&](auto x, auto y_type) {
    using Y = decltype(y_type);
    const Stored<decltype(x)> load{p.x, p.group_size};
    const OutputRows<Y> y(p.y, p.group_size, traffic);
    with_activation(p.activation, [&](auto a) {
      for_rows<Layer>(rows, begin, end, traffic, load, WriteActivated<Y, decltype(a)>{p, y});
    });
  });
}

// What the gradients are made of, for vectors of one column.
template <class A, class Extent>
struct GroupCotangents {
  Extent extent;
  Vec mean, rstd, scale, bias;

  GroupCotangents(const GroupColumns& columns, int64_t column, Extent extent)
      : extent(extent),
        mean(load(columns.mean + column, extent)),
        rstd(load(columns.rstd + column, extent)),
        scale(load(columns.scale + column, extent)),
        bias(load(columns.bias + column, extent)) {}

  template <class X>
  Vec x_hat(const X* x) const {
    return (load(x, extent) - mean) * rstd;
  }
  template <class Dy>
  Vec dz(const Dy* dy, Vec x_hat) const {
    return sloped<A>(load(dy, extent), fma(x_hat, scale, bias));
  }
};

template <class A, class Dy, class X>
void group_norm_sums(const GroupTile& tile, const GroupColumns& columns, const Dy* dy, const X* x,
                     const GroupGradSums& sums) {
  const int64_t cols = tile.cols;
  fill(sums.dz, 0, cols), fill(sums.dz_x_hat, 0, cols);
  for_each_vector_to_sum(tile, [=, dz_sums = sums.dz, dz_x_hat_sums = sums.dz_x_hat](int64_t row, int64_t end,
                                                                                     int64_t column, auto extent) {
    const GroupCotangents<A, decltype(extent)> of(columns, column, extent);
    Vec sum = load(dz_sums + column, extent), product = load(dz_x_hat_sums + column, extent);
    for (; row < end; ++row) {
      const int64_t i = row * cols + column;
      const Vec x_hat = of.x_hat(x + i), dz = of.dz(dy + i, x_hat);
      sum += dz;
      product = fma(dz, x_hat, product);
    }
    store(dz_sums + column, sum, extent);
    store(dz_x_hat_sums + column, product, extent);
  });
}

template <class A, class Dy, class X>
void group_norm_grad(const GroupTile& tile, const GroupColumns& columns, const Dy* dy, const X* x,
                     const OutputRows<X>& dx) {
  for_each_vector_to_write(tile, [=, cols = tile.cols](int64_t row, int64_t column, auto extent) {
    const GroupCotangents<A, decltype(extent)> of(columns, column, extent);
    const int64_t i = row * cols + column;
    const Vec x_hat = of.x_hat(x + i), dz = of.dz(dy + i, x_hat);
    const Vec rest = fma(dz, of.scale, -load(columns.mean_g + column, extent));
    dx[row](column, fma(x_hat, load(columns.minus_mean_g_x_hat + column, extent), rest) * of.rstd, extent);
  });
}

// Calls f(a, dy, x) with the activation and a tile's elements of dy and x.
template <class F>
void with_group_operands(const GroupNormBackward& p, const GroupTile& tile, F f) {
  with_types(p.dy.dtype, p.x.dtype, [&](auto dy_type, auto x_type) {
    const auto* const dy = static_cast<const decltype(dy_type)*>(p.dy.data) + tile.begin;
    const auto* const x = static_cast<const decltype(x_type)*>(p.x.data) + tile.begin;
    with_activation(p.activation, [&](auto a) { f(a, dy, x); });
  });
}

void group_norm_sums(const GroupNormBackward& p, const GroupTile& tile, const GroupColumns& columns,
                     const GroupGradSums& sums) {
  with_group_operands(p, tile,
                      [&](auto a, auto* dy, auto* x) { group_norm_sums<decltype(a)>(tile, columns, dy, x, sums); });
}

template <class X>
OutputRows<X> dx_rows(const GroupNormBackward& p, const GroupTile& tile, const X*, int64_t traffic) {
  return {{static_cast<X*>(p.dx.data) + tile.begin, p.dx.dtype}, tile.cols, traffic};
}

void group_norm_grad(const GroupNormBackward& p, const GroupTile& tile, const GroupColumns& columns, int64_t traffic) {
  with_group_operands(p, tile, [&](auto a, auto* dy, auto* x) {
    group_norm_grad<decltype(a)>(tile, columns, dy, x, dx_rows(p, tile, x, traffic));
  });
  fence();
}

}  // namespace

const GroupNormKernels GroupNormKernels::JAXNORM_ISA = {cpu::group_norm_rows, cpu::group_moments, cpu::group_norm,
                                                        cpu::group_norm_sums, cpu::group_norm_grad};

}  // namespace jaxnorm::cpu
