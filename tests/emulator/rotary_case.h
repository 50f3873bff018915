// Cases of rotary embedding with the norms of queries and keys: their operands, and the formulas in float64.
#pragma once

#include <algorithm>
#include <cstdio>
#include <utility>

#include "array.h"
#include "ops/qk_norm_rotary/call.h"

namespace jaxnorm {

constexpr Dtype kF32 = Dtype::f32, kBf16 = Dtype::bf16;
constexpr double kEpsilon = 1e-6, kOffset = 0.5;
inline int failures = 0;

struct Case {
  HeadNorm norm;
  Dtype dtype, weights;
  bool heads_first;  // (batch, heads, tokens, cols), else (batch, tokens, heads, cols)
  bool interleaved, tables, scaled, q_per_head, k_per_head;
  int64_t batch, length, q_heads, k_heads, cols, dim;
  int64_t same = 0;  // how many neighbouring tokens of a batch have the same turn; 0: each has its own

  int64_t tokens() const { return batch * length; }
  int64_t inner() const { return heads_first ? length : 1; }
  int64_t row(int64_t token, int64_t heads, int64_t head) const {
    return (token / inner() * heads + head) * inner() + token % inner();
  }
  // Where tokens are (batch, same, length / same), the turns are (batch, 1, length / same) or (1, 1, length / same).
  BroadcastRows token_rows() const {
    if (same == 0) return {{}, {tokens(), 1}};
    return {{tables ? batch : 1, length}, {length / same, 1}};
  }
  int64_t turns() const { return token_rows().outer.count * token_rows().inner.count; }
  int64_t turn(int64_t token) const {
    const auto [outer, inner] = token_rows();
    return token / outer.inner % outer.count * inner.count + token % inner.count;
  }

  void expect(bool holds, const char* what) const {
    if (holds) return;
    ++failures;
    const char* const norms[] = {"no norm", "rms", "layer"};
    std::printf("%s: %s, %s, scale %s%s%s, %s%s%s, batch %ld of %ld, heads %ld and %ld, cols %ld, dim %ld\n", what,
                norms[static_cast<int>(norm)], dtype == kF32 ? "f32" : "bf16",
                !scaled           ? "absent"
                : weights == kF32 ? "f32"
                                  : "bf16",
                q_per_head ? " q per head" : "", k_per_head ? " k per head" : "",
                heads_first ? "heads first" : "tokens first", interleaved ? ", interleaved" : "",
                tables ? ", tables" : "", batch, length, q_heads, k_heads, cols, dim);
  }
};

inline Array moved(const Array& array, int64_t offset) {
  const Input from = array;
  Array to(from.dtype, array.elements(), offset);
  for (int64_t i = 0; i < array.elements(); ++i) to.set(i, array[i]);
  return to;
}

struct Operands {
  struct Of {
    Array x, dy, scale;
  };
  Array positions, frequencies, cos, sin;
  Of q, k;

  explicit Operands(const Case& c)
      : positions(kF32, c.turns()),
        frequencies(kF32, c.dim / 2),
        cos(kF32, c.turns() * c.dim / 2),
        sin(kF32, c.turns() * c.dim / 2),
        q(of(c, c.q_heads, c.q_per_head)),
        k(of(c, c.k_heads, c.k_per_head)) {
    for (int64_t i = 0; i < c.turns(); ++i) positions.set(i, static_cast<float>(i * i * i % 200'003) - 7);
    for (int64_t i = 0; i < c.dim / 2; ++i)
      frequencies.set(i, static_cast<float>(std::pow(10000.0, -2.0 * static_cast<double>(i) / c.dim)));
    // Tables of no angle show which of the two is which.
    for (int64_t i = 0; i < c.turns() * c.dim / 2; ++i) {
      cos.set(i, static_cast<float>(std::cos(0.37 * static_cast<double>(i))) + 0.25f);
      sin.set(i, static_cast<float>(std::sin(0.11 * static_cast<double>(i))) - 0.5f);
    }
  }

  // The same, `offset` elements away from where they would be aligned.
  Operands(const Operands& o, int64_t offset)
      : positions(moved(o.positions, offset)),
        frequencies(moved(o.frequencies, offset)),
        cos(moved(o.cos, offset)),
        sin(moved(o.sin, offset)),
        q{moved(o.q.x, offset), moved(o.q.dy, offset), moved(o.q.scale, offset)},
        k{moved(o.k.x, offset), moved(o.k.dy, offset), moved(o.k.scale, offset)} {}

  static Of of(const Case& c, int64_t heads, bool per_head) {
    const int64_t elements = c.tokens() * heads * c.cols;
    return {Array::normal(c.dtype, elements, 0), Array::normal(c.dtype, elements, 0),
            Array::normal(c.weights, (per_head ? heads : 1) * c.cols, 0)};
  }

  // Of the pair of a token.
  std::pair<double, double> sin_cos(const Case& c, int64_t token, int64_t pair) const {
    const int64_t turn = c.turn(token), at = turn * c.dim / 2 + pair;
    if (c.tables) return {sin[at], cos[at]};
    const float angle = positions[turn] * frequencies[pair];
    return {std::sin(double{angle}), std::cos(double{angle})};
  }
};

// The columns of a pair.
inline std::pair<int64_t, int64_t> columns(const Case& c, int64_t pair) {
  if (c.interleaved) return {2 * pair, 2 * pair + 1};
  return {pair, pair + c.dim / 2};
}

struct Exact {
  std::vector<double> y, size, mean, rstd, dx, dscale;  // size: of what y is a sum of

  Exact(const Case& c, const Operands& o, const Operands::Of& of, int64_t heads, bool per_head)
      : y(c.tokens() * heads * c.cols),
        size(y.size()),
        mean(c.tokens() * heads),
        rstd(mean.size()),
        dx(y.size()),
        dscale((per_head ? heads : 1) * c.cols) {
    for (int64_t token = 0; token < c.tokens(); ++token)
      for (int64_t head = 0; head < heads; ++head) add_row(c, o, of, token, head, heads, per_head ? head * c.cols : 0);
  }

 private:
  void add_row(const Case& c, const Operands& o, const Operands::Of& of, int64_t token, int64_t head, int64_t heads,
               int64_t weight) {
    const int64_t row = c.row(token, heads, head), at = row * c.cols, cols = c.cols;
    const bool normed = c.norm != HeadNorm::none, layer = c.norm == HeadNorm::layer;
    std::vector<double> x_hat(cols), factor(cols, 1), h(cols), dh(cols);
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < cols; ++i) sum += of.x[at + i] / static_cast<double>(cols);
    mean[row] = layer ? sum : 0;
    for (int64_t i = 0; i < cols; ++i) squares += (of.x[at + i] - mean[row]) * (of.x[at + i] - mean[row]);
    rstd[row] = normed ? 1 / std::sqrt(squares / static_cast<double>(cols) + kEpsilon) : 1;
    for (int64_t i = 0; i < cols; ++i) {
      x_hat[i] = (of.x[at + i] - mean[row]) * rstd[row];
      if (c.scaled && normed) factor[i] = of.scale[weight + i] + kOffset;
      h[i] = x_hat[i] * factor[i];
      dh[i] = of.dy[at + i];
      y[at + i] = h[i];
      size[at + i] = std::fabs(h[i]);
    }
    for (int64_t pair = 0; pair < c.dim / 2; ++pair) {
      const auto [a, b] = columns(c, pair);
      const auto [sin, cos] = o.sin_cos(c, token, pair);
      y[at + a] = h[a] * cos - h[b] * sin;
      y[at + b] = h[b] * cos + h[a] * sin;
      size[at + a] = size[at + b] = std::fabs(h[a]) + std::fabs(h[b]);
      dh[a] = of.dy[at + a] * cos + of.dy[at + b] * sin;
      dh[b] = of.dy[at + b] * cos - of.dy[at + a] * sin;
    }
    // Where a mean is subtracted, what is left of an element may be small.
    const double largest = *std::max_element(size.begin() + at, size.begin() + at + cols);
    if (layer) std::fill_n(size.begin() + at, cols, largest);
    double g = 0, gx = 0;
    for (int64_t i = 0; i < cols; ++i) {
      g += dh[i] * factor[i] / static_cast<double>(cols);
      gx += dh[i] * factor[i] * x_hat[i] / static_cast<double>(cols);
    }
    for (int64_t i = 0; i < cols; ++i) {
      dx[at + i] = normed ? rstd[row] * (dh[i] * factor[i] - (layer ? g : 0) - x_hat[i] * gx) : dh[i];
      dscale[weight + i] += dh[i] * x_hat[i];
    }
  }
};

}  // namespace jaxnorm
