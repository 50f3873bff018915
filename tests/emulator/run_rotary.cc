// Runs the CUDA kernels of rotary embedding with the norms of queries and keys on the host and compares results and
// gradients with the formulas in float64, and bit for bit what arrays give that are aligned to 16 bytes with what
// others do, and a token by itself with one among others.
//
//   run_rotary              every regime
//   run_rotary COLS DIM     one shape
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "array.h"
#include "cuda/ops.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

constexpr Dtype kF32 = Dtype::f32, kBf16 = Dtype::bf16;
constexpr double kEpsilon = 1e-6, kOffset = 0.5;
int failures = 0;

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

Array moved(const Array& array, int64_t offset) {
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
std::pair<int64_t, int64_t> columns(const Case& c, int64_t pair) {
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

struct Results {
  struct Of {
    Array y, mean, rstd, dx, dscale;

    Of(const Case& c, int64_t heads, bool per_head, int64_t offset)
        : y(c.dtype, c.tokens() * heads * c.cols, offset),
          mean(kF32, c.tokens() * heads),
          rstd(kF32, c.tokens() * heads),
          dx(c.dtype, c.tokens() * heads * c.cols, offset),
          dscale(kF32, (per_head ? heads : 1) * c.cols) {}

    bool has_rows_of(const Of& o) const { return y == o.y && mean == o.mean && rstd == o.rstd && dx == o.dx; }
  };
  Of q, k;

  Results(const Case& c, int64_t offset)
      : q(c, c.q_heads, c.q_per_head, offset), k(c, c.k_heads, c.k_per_head, offset) {}
};

Rotation rotation_of(const Case& c, const Operands& o) {
  Rotation r;
  r.dim = c.dim;
  r.interleaved = c.interleaved;
  r.token_rows = c.token_rows();
  const auto floats = [](const Array& array) { return static_cast<const float*>(Input(array).data); };
  if (c.tables) {
    r.cos = floats(o.cos), r.sin = floats(o.sin);
  } else {
    r.positions = floats(o.positions), r.frequencies = floats(o.frequencies);
  }
  return r;
}

Heads heads_of(const Case& c, const Operands::Of& o, Results::Of& r, int64_t heads, bool per_head) {
  Heads h;
  h.heads = heads;
  h.x = o.x, h.y = r.y;
  h.has_scale_per_head = per_head && c.scaled;
  if (c.norm == HeadNorm::none) return h;
  if (c.scaled) h.scale = o.scale;
  if (c.norm == HeadNorm::layer) h.mean = r.mean.floats();
  h.rstd = r.rstd.floats();
  return h;
}

QkNormRotaryForward forward_of(const Case& c, const Operands& o, Results& r) {
  QkNormRotaryForward f{};
  f.norm = c.norm, f.tokens = c.tokens(), f.inner = c.inner(), f.cols = c.cols;
  f.epsilon = kEpsilon, f.scale_offset = kOffset, f.rotation = rotation_of(c, o);
  f.q = heads_of(c, o.q, r.q, c.q_heads, c.q_per_head);
  f.k = heads_of(c, o.k, r.k, c.k_heads, c.k_per_head);
  return f;
}

HeadsGrad grad_of(const Case& c, const Heads& h, const Operands::Of& o, Results::Of& r) {
  HeadsGrad g;
  g.heads = h.heads, g.dy = o.dy, g.dx = r.dx;
  g.has_scale_per_head = h.has_scale_per_head;
  if (c.norm == HeadNorm::none) return g;
  g.x = o.x, g.scale = h.scale, g.mean = h.mean, g.rstd = h.rstd;
  if (c.scaled) g.dscale = r.dscale;
  return g;
}

QkNormRotaryBackward backward_of(const Case& c, const Operands& o, const QkNormRotaryForward& f, Results& r) {
  QkNormRotaryBackward b{};
  b.norm = c.norm, b.tokens = f.tokens, b.inner = f.inner, b.cols = f.cols;
  b.scale_offset = kOffset, b.rotation = f.rotation;
  b.q = grad_of(c, f.q, o.q, r.q);
  b.k = grad_of(c, f.k, o.k, r.k);
  return b;
}

Array workspace_of(const Case& c) {
  const int64_t rows = std::max(c.q_per_head ? c.q_heads : 1, c.k_per_head ? c.k_heads : 1);
  return Array(kF32, qk_norm_rotary_backward_workspace({c.dtype, c.cols, 2, {rows, 1}, true}).floats);
}

Results results_of(const Case& c, const Operands& o, int64_t offset) {
  Results r(c, offset);
  const QkNormRotaryForward f = forward_of(c, o, r);
  c.expect(run(f, nullptr) == cudaSuccess, "forward");
  QkNormRotaryBackward b = backward_of(c, o, f, r);
  Array workspace = workspace_of(c);
  b.workspace = workspace.workspace();
  c.expect(run(b, nullptr) == cudaSuccess, "backward");
  return r;
}

// What is computed alone has the same bits.
void test_parts(const Case& c, const Operands& o, Results& r) {
  Results parts(c, 0);
  QkNormRotaryForward f = forward_of(c, o, parts);
  f.q.mean = f.q.rstd = f.k.mean = f.k.rstd = nullptr;
  c.expect(run(f, nullptr) == cudaSuccess && parts.q.y == r.q.y && parts.k.y == r.k.y, "without statistics");

  f = forward_of(c, o, r);
  const QkNormRotaryBackward all = backward_of(c, o, f, parts);
  Array workspace = workspace_of(c);
  QkNormRotaryBackward b = all;
  b.q.dscale = b.k.dscale = b.k.dx = {};
  c.expect(run(b, nullptr) == cudaSuccess && parts.q.dx == r.q.dx, "dq alone");
  b = all;
  b.q.dscale = b.k.dscale = b.q.dx = {};
  c.expect(run(b, nullptr) == cudaSuccess && parts.k.dx == r.k.dx, "dk alone");
  if (!all.q.dscale) return;
  b = all;
  b.q.dx = b.k.dx = {};
  b.workspace = workspace.workspace();
  c.expect(run(b, nullptr) == cudaSuccess && parts.q.dscale == r.q.dscale && parts.k.dscale == r.k.dscale,
           "gradients of scales alone");
  b.k.dscale = {};
  Array q_alone(kF32, (c.q_per_head ? c.q_heads : 1) * c.cols);
  b.q.dscale = q_alone;
  c.expect(run(b, nullptr) == cudaSuccess && q_alone.error(Exact(c, o, o.q, c.q_heads, c.q_per_head).dscale) < 5e-6,
           "dq_scale alone");
}

// The last token by itself.
void test_one_token(const Case& c, const Operands& o, Results& r) {
  Case one = c;
  one.batch = one.length = 1;
  Results own(one, 0);
  Results all(c, 0);
  const int64_t token = c.tokens() - 1, size = size_of(c.dtype);
  QkNormRotaryForward f = forward_of(one, o, own), whole = forward_of(c, o, r);
  f.rotation = whole.rotation;
  const int64_t turn = c.turn(token);
  f.rotation.token_rows = {};
  if (c.tables) {
    f.rotation.cos += turn * c.dim / 2, f.rotation.sin += turn * c.dim / 2;
  } else {
    f.rotation.positions += turn;
  }
  if (c.heads_first) return;  // its rows do not lie side by side
  f.q.x.data = static_cast<const char*>(f.q.x.data) + c.row(token, c.q_heads, 0) * c.cols * size;
  f.k.x.data = static_cast<const char*>(f.k.x.data) + c.row(token, c.k_heads, 0) * c.cols * size;
  bool holds = run(f, nullptr) == cudaSuccess;
  for (int64_t i = 0; i < c.q_heads * c.cols; ++i) holds &= own.q.y[i] == r.q.y[token * c.q_heads * c.cols + i];
  for (int64_t i = 0; i < c.k_heads * c.cols; ++i) holds &= own.k.y[i] == r.k.y[token * c.k_heads * c.cols + i];
  c.expect(holds, "a token alone");
}

void compare(const Case& c, const Operands& o, const Operands::Of& of, const Results::Of& r, int64_t heads,
             bool per_head, const char* what) {
  const Exact exact(c, o, of, heads, per_head);
  const auto expect = [&](bool holds, const char* which) { c.expect(holds, (std::string(what) + which).c_str()); };
  double worst = 0;
  for (size_t i = 0; i < exact.y.size(); ++i) {
    const double rounding = c.dtype == kF32 ? 0 : std::fabs(exact.y[i]) * 0x1p-8;
    const double error = std::max(0.0, std::fabs(r.y[i] - exact.y[i]) - rounding) / exact.size[i];
    if (!(error <= worst)) worst = std::isnan(r.y[i]) ? 1 : error;
  }
  expect(worst < 8e-7, "y");
  const bool normed = c.norm != HeadNorm::none;
  expect(!normed || r.rstd.error(exact.rstd) < 3e-7, "rstd");
  bool are_means = true;
  for (size_t row = 0; row < exact.mean.size(); ++row)
    are_means &= std::fabs(r.mean[row] - exact.mean[row]) < 1e-6 || c.norm != HeadNorm::layer;
  expect(are_means, "mean");
  expect(r.dx.error(exact.dx) < (c.dtype == kF32 ? 1e-6 : 4e-3), "dx");
  expect(!normed || !c.scaled || r.dscale.error(exact.dscale) < 5e-6, "dscale");
}

void test(const Case& c) {
  const Operands operands(c);
  Results results = results_of(c, operands, 0);
  compare(c, operands, operands.q, results.q, c.q_heads, c.q_per_head, "q: ");
  compare(c, operands, operands.k, results.k, c.k_heads, c.k_per_head, "k: ");
  test_parts(c, operands, results);
  test_one_token(c, operands, results);
  const Results unaligned = results_of(c, Operands(operands, 1), 1);
  c.expect(unaligned.q.has_rows_of(results.q) && unaligned.k.has_rows_of(results.k), "unaligned arrays");
}

void test_all(int64_t cols, int64_t dim) {
  tier.begin_shape();
  for (const Dtype dtype : {kF32, kBf16})
    for (const HeadNorm norm : {HeadNorm::rms, HeadNorm::layer, HeadNorm::none})
      for (const bool heads_first : {false, true})
        for (const bool interleaved : {false, true}) {
          // LayerNorm of two elements is 1 and -1, whatever they are.
          if (!tier.takes() || (cols == 2 && norm == HeadNorm::layer)) continue;
          const bool odd = heads_first != interleaved;
          const Dtype weights = odd ? kF32 : kBf16;
          test({norm, dtype, weights, heads_first, interleaved, odd, true, false, false, 2, 19, 4, 2, cols, dim});
          test({norm, dtype, weights, heads_first, interleaved, !odd, true, true, odd, 3, 6, 6, 1, cols, dim, 3});
          test({norm, dtype, dtype, heads_first, interleaved, odd, odd, false, true, 1, 1, 5, 3, cols, dim});
        }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) {
    test_all(std::atoll(argv[1]), std::atoll(argv[2]));
  } else {
    for (const int64_t cols : {64, 128, 256, 512})
      for (const int64_t dim : {cols, cols / 2, cols / 4}) test_all(cols, dim);
    for (const int64_t cols : {2, 16, 24, 80, 96, 100, 101, 192, 320, 511})
      for (const int64_t dim : {cols / 2 * 2, (cols + 6) / 8 * 2}) test_all(cols, dim);
    // More rows than blocks have at once.
    for (const bool heads_first : {false, true})
      test({HeadNorm::rms, kBf16, kF32, heads_first, false, false, true, heads_first, !heads_first, 2, 700, 8, 2, 128,
            128});
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
