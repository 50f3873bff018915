// Runs the CUDA kernels of rotary embedding with the norms of queries and keys on the host and compares results and
// gradients with the formulas in float64, and bit for bit what arrays give that are aligned to 16 bytes with what
// others do, a token by itself with one among others, and the parts of a packed array with arrays of their own.
//
//   run_rotary              every regime
//   run_rotary COLS DIM     one shape
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>

#include "ops/qk_norm_rotary/cuda.h"
#include "rotary_case.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

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
  h.heads = h.x_rows = h.y_rows = heads;
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
  g.heads = g.x_rows = h.heads, g.dy = o.dy, g.dx = r.dx;
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
  return Array(kF32, qk_norm_rotary_grad_workspace({c.dtype, c.cols, 2, {rows, 1}, true}).floats);
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

// One array of q, k and v, which has `rows` rows of a token.
struct Packed {
  const Case& c;
  int64_t rows = c.q_heads + 2 * c.k_heads;

  // Of these arrays; without `v` it has zeros there.
  Array of(const Array& q, const Array& k, const Array* v, int64_t offset) const {
    const int64_t q_size = c.q_heads * c.cols, k_size = c.k_heads * c.cols;
    Array array(c.dtype, c.tokens() * rows * c.cols, offset);
    for (int64_t at = 0; at < array.elements(); ++at) {
      const int64_t token = at / (rows * c.cols), i = at % (rows * c.cols);
      array.set(at, i < q_size            ? q[token * q_size + i]
                    : i < q_size + k_size ? k[token * k_size + i - q_size]
                    : v                   ? (*v)[token * k_size + i - q_size - k_size]
                                          : 0);
    }
    return array;
  }

  // The part that begins with this head.
  template <typename Pointer>
  Pointer from(Pointer array, int64_t head) const {
    array.data = (char*)array.data + head * c.cols * size_of(array.dtype);
    return array;
  }
};

// What q and k give as parts of one array has the bits `r` of arrays apart; v is copied if it is wanted, and else its
// gradient is zero. `o`: the operands at this offset.
void test_packed(const Case& c, const Operands& o, const Results& r, bool with_v, int64_t offset) {
  const Packed packed{c};
  const Array &v = o.k.dy, &dv = o.k.x;
  const Array qkv = packed.of(o.q.x, o.k.x, &v, offset),
              expected = packed.of(r.q.dx, r.k.dx, with_v ? &dv : nullptr, 0);
  Array dqkv(c.dtype, qkv.elements(), offset), v_out(c.dtype, v.elements(), offset);
  Results own(c, offset);
  const int64_t k_begin = c.q_heads, v_begin = c.q_heads + c.k_heads;

  QkNormRotaryForward f = forward_of(c, o, own);
  f.q.x = qkv, f.k.x = packed.from(Input(qkv), k_begin), f.v.x = packed.from(Input(qkv), v_begin);
  f.q.x_rows = f.k.x_rows = f.v.x_rows = packed.rows, f.v.y_rows = c.k_heads;
  if (with_v) f.v.y = v_out;
  c.expect(run(f, nullptr) == cudaSuccess && (!with_v || v_out == v), "packed v");

  QkNormRotaryBackward b = backward_of(c, o, f, own);
  Array workspace = workspace_of(c);
  b.workspace = workspace.workspace();
  b.q.dx = dqkv, b.k.dx = packed.from(Output(dqkv), k_begin), b.v.y = packed.from(Output(dqkv), v_begin);
  if (c.norm != HeadNorm::none) b.q.x = f.q.x, b.k.x = f.k.x;
  b.q.x_rows = b.k.x_rows = b.v.y_rows = packed.rows, b.v.x_rows = c.k_heads;
  if (with_v) b.v.x = dv;
  c.expect(run(b, nullptr) == cudaSuccess && dqkv == expected,
           with_v ? "packed gradient" : "packed gradient without v");
  const auto has_others = [](const Results::Of& own, const Results::Of& r) {
    return own.y == r.y && own.mean == r.mean && own.rstd == r.rstd && own.dscale == r.dscale;
  };
  c.expect(has_others(own.q, r.q) && has_others(own.k, r.k), "packed q and k");
  if (!b.q.dscale) return;
  Results scales(c, 0);
  b.q.dx = b.k.dx = b.v.y = {}, b.q.dscale = scales.q.dscale, b.k.dscale = scales.k.dscale;
  const bool holds = run(b, nullptr) == cudaSuccess;
  c.expect(holds && scales.q.dscale == r.q.dscale && scales.k.dscale == r.k.dscale, "scales of a packed array");
}

// In workspaces of other sizes than are wanted, as of programs that another build exported.
void test_workspaces(const Case& c) {
  const Operands o(c);
  Results r = results_of(c, o, 0), other(c, 0);
  QkNormRotaryBackward b = backward_of(c, o, forward_of(c, o, r), other);
  const int64_t wanted = workspace_of(c).elements();
  Array room(kF32, wanted + 1);
  b.workspace = room.workspace();
  c.expect(run(b, nullptr) == cudaSuccess && other.q.dscale == r.q.dscale && other.k.dscale == r.k.dscale,
           "a larger workspace");
  const Exact of_q(c, o, o.q, c.q_heads, c.q_per_head), of_k(c, o, o.k, c.k_heads, c.k_per_head);
  for (int64_t floats = wanted - 1; floats > 0; floats /= 3) {
    b.workspace.floats = floats;
    const cudaError_t error = run(b, nullptr);
    if (error == cudaErrorMemoryAllocation) {
      const int64_t rows = (c.q_per_head ? 2 * c.q_heads : 1) + (c.k_per_head ? 2 * c.k_heads : 1);
      c.expect(floats < rows * c.cols, "a workspace large enough");
      continue;
    }
    c.expect(error == cudaSuccess && other.q.dx == r.q.dx && other.k.dx == r.k.dx, "a smaller workspace");
    c.expect(other.q.dscale.error(of_q.dscale) < 5e-6 && other.k.dscale.error(of_k.dscale) < 5e-6,
             "sums in a smaller workspace");
  }
}

void compare(const Case& c, const Operands& o, const Operands::Of& of, const Results::Of& r, int64_t heads,
             bool per_head, const char* what) {
  const Exact exact(c, o, of, heads, per_head);
  const auto expect = [&](bool holds, const char* which) { c.expect(holds, (std::string(what) + which).c_str()); };
  double worst = 0;
  for (size_t i = 0; i < exact.y.size(); ++i) {
    const double rounding = c.dtype == kF32 ? 0 : std::fabs(exact.y[i]) * 0x1p-8;
    const double error = std::max(0.0, std::fabs(r.y[i] - exact.y[i]) - rounding) / (exact.size[i] + 1e-30);
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
  const Operands moved(operands, 1);
  const Results unaligned = results_of(c, moved, 1);
  c.expect(unaligned.q.has_rows_of(results.q) && unaligned.k.has_rows_of(results.k), "unaligned arrays");
  if (c.heads_first) return;
  test_packed(c, operands, results, !c.interleaved, 0);
  test_packed(c, moved, results, c.interleaved, 1);
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
    for (const bool heads_first : {false, true}) {
      const bool one = heads_first, other = !heads_first;
      const Case c{HeadNorm::rms, kBf16, kF32, heads_first, false, false, true, one, other, 2, 700, 8, 2, 128, 128};
      test(c);
      test_workspaces(c);
      test_workspaces({HeadNorm::layer, kF32, kF32, heads_first, true, true, true, other, one, 1, 90, 5, 20, 64, 48});
    }
    test_workspaces({HeadNorm::rms, kF32, kF32, false, false, true, true, false, false, 1, 90, 5, 20, 64, 48});
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
