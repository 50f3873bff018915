// The tiles of GroupNorm, see group_tile.h.
//
// Some neighbouring rows go together, so that what is kept for a column is read and written once for all of them.
#pragma once

#include "cpu/engine/columns.h"
#include "cpu/engine/memory.h"
#include "cpu/engine/types.h"
#include "cpu/ops/activation.h"
#include "cpu/ops/group_tile.h"
#include "ops/group_norm.h"

namespace jaxnorm::cpu {
namespace {

constexpr int kRowsTogether = 4;

// Calls f(row, end, column, extent) for vectors of the columns of some rows from `row` to `end`.
template <class F>
[[gnu::always_inline]] inline void for_each_tile_vector(const GroupTile& tile, F f) {
  const int64_t rows = tile.rows;
  for (int64_t row = 0; row < rows; row += kRowsTogether) {
    const int64_t end = rows - row < kRowsTogether ? rows : row + kRowsTogether;
    for_each_vector(tile.cols, [&](int64_t column, auto extent) { f(row, end, column, extent); });
  }
}

// Two passes, of which the second finds the tile in the cache.
template <class X>
void group_moments(const X* x, const GroupTile& tile, const GroupMoments& moments) {
  const auto [mean, rest, m2] = moments;
  const int64_t cols = tile.cols;
  fill(mean, 0, cols), fill(rest, 0, cols), fill(m2, 0, cols);
  for_each_tile_vector(tile, [=](int64_t row, int64_t end, int64_t column, auto extent) {
    Vec sum = load(mean + column, extent);
    for (; row < end; ++row) sum += load(x + row * cols + column, extent);
    store(mean + column, sum, extent);
  });
  const float reciprocal = 1.f / tile.rows;
  for_each_vector(cols, [=](int64_t column, auto extent) {
    store(mean + column, load(mean + column, extent) * reciprocal, extent);
  });
  for_each_tile_vector(tile, [=](int64_t row, int64_t end, int64_t column, auto extent) {
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
void with_activation(PointwiseActivation activation, F f) {
  switch (activation) {
    case PointwiseActivation::silu:
      return f(Silu{});
    case PointwiseActivation::relu:
      return f(Relu{});
    case PointwiseActivation::gelu:
      return f(Gelu{});
    default:
      return f(Identity{});
  }
}

template <class A, class X, class Y>
void group_norm(const GroupTile& tile, const GroupColumns& columns, const X* x, const OutputRows<Y>& y) {
  const auto [mean, rstd, scale, bias, shift, mean_g, minus_mean_g_x_hat] = columns;
  const int64_t cols = tile.cols;
  for_each_tile_vector(tile, [=](int64_t row, int64_t end, int64_t column, auto extent) {
    const Vec centre = load(mean + column, extent), factor = load(rstd + column, extent);
    const Vec left = load(shift + column, extent);
    const Vec a = load(scale + column, extent), b = load(bias + column, extent);
    for (; row < end; ++row) {
      const Vec x_hat = fma(load(x + row * cols + column, extent) - centre, factor, left);
      y[row](column, A::of(fma(x_hat, a, b)), extent);
    }
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

// Calls f(row, column, extent, x_hat, dz) for rows of which for_each_tile_vector() has called it.
template <class A, class Dy, class X>
struct GroupCotangents {
  const Dy* dy;
  const X* x;
  int64_t cols;
  Vec mean, rstd, scale, bias;

  template <class Extent>
  [[gnu::always_inline]] GroupCotangents(const Dy* dy, const X* x, int64_t cols, const GroupColumns& columns,
                                         int64_t column, Extent extent)
      : dy(dy + column),
        x(x + column),
        cols(cols),
        mean(load(columns.mean + column, extent)),
        rstd(load(columns.rstd + column, extent)),
        scale(load(columns.scale + column, extent)),
        bias(load(columns.bias + column, extent)) {}

  template <class Extent, class F>
  [[gnu::always_inline]] void operator()(int64_t row, int64_t end, Extent extent, F f) const {
    for (; row < end; ++row) {
      const Vec x_hat = (load(x + row * cols, extent) - mean) * rstd;
      f(row, x_hat, load(dy + row * cols, extent) * A::with_slope(fma(x_hat, scale, bias)).slope);
    }
  }
};

template <class A, class Dy, class X>
void group_norm_sums(const GroupTile& tile, const GroupColumns& columns, const Dy* dy, const X* x,
                     const GroupGradSums& sums) {
  const auto [dz_sums, dz_x_hat_sums] = sums;
  fill(dz_sums, 0, tile.cols), fill(dz_x_hat_sums, 0, tile.cols);
  for_each_tile_vector(tile, [=, cols = tile.cols](int64_t row, int64_t end, int64_t column, auto extent) {
    const GroupCotangents<A, Dy, X> cotangents(dy, x, cols, columns, column, extent);
    Vec sum = load(dz_sums + column, extent), product = load(dz_x_hat_sums + column, extent);
    cotangents(row, end, extent, [&](int64_t, Vec x_hat, Vec dz) {
      sum += dz;
      product = fma(dz, x_hat, product);
    });
    store(dz_sums + column, sum, extent);
    store(dz_x_hat_sums + column, product, extent);
  });
}

template <class A, class Dy, class X>
void group_norm_grad(const GroupTile& tile, const GroupColumns& columns, const Dy* dy, const X* x,
                     const OutputRows<X>& dx) {
  for_each_tile_vector(tile, [=, cols = tile.cols](int64_t row, int64_t end, int64_t column, auto extent) {
    const GroupCotangents<A, Dy, X> cotangents(dy, x, cols, columns, column, extent);
    const Vec mean_g = load(columns.mean_g + column, extent);
    const Vec minus_mean_g_x_hat = load(columns.minus_mean_g_x_hat + column, extent);
    cotangents(row, end, extent, [&](int64_t row, Vec x_hat, Vec dz) {
      dx[row](column, fma(x_hat, minus_mean_g_x_hat, fma(dz, cotangents.scale, -mean_g)) * cotangents.rstd, extent);
    });
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
}  // namespace jaxnorm::cpu
