// What tests/sanitize.cu runs, which says how an array is allocated and how an op is called.
#pragma once

#include <cstdint>

#include "ops/norm/gated.h"
#include "ops/norm/quantized.h"
#include "ops/qk_norm_rotary/call.h"

namespace jaxnorm::sanitize {

// An array of its own allocation, so that a tool sees what lies beside it; inputs hold a pattern of small numbers.
// `offset`: in elements, so that it is aligned to them and to nothing more.
class Array {
 public:
  Array(Dtype dtype, int64_t elements, int64_t offset, bool is_input = true);
  ~Array();
  Array(const Array&) = delete;

  void* get() const { return data_ + offset_; }
  float* floats() const { return static_cast<float*>(get()); }
  operator Input() const { return {get(), dtype_}; }
  operator Output() const { return {get(), dtype_}; }

 private:
  Dtype dtype_;
  int64_t offset_;  // in bytes
  char* data_;
};

// Runs an op to its end.
template <class Op>
void call(const Op& op, const char* what);

// Of the arrays with the gradients of weights, from that of the other arrays.
int64_t offset_of_gradients(int64_t offset);

struct Shape {
  int64_t rows, cols;
  int64_t offset = 0;  // of each array
  RowMap weight_rows = {};
  int64_t pad = 0;  // columns after each row of y and dy
};

// Forward and backward, alone and of a sum that takes the addend's place; `weight` is the dtype of scale and bias.
inline void run_norm(Kind kind, Dtype dtype, Dtype y_dtype, Dtype weight, const Shape& s,
                     bool multiply_before_cast = true) {
  const int64_t rows = s.rows, cols = s.cols, size = rows * cols, weights = s.weight_rows.count * cols;
  const int64_t offset_of_sums = offset_of_gradients(s.offset);
  const Array x(dtype, size, s.offset), scale(weight, weights, s.offset), bias(weight, weights, s.offset);
  const Array y(y_dtype, rows * (cols + s.pad), s.offset, false), sum(dtype, size, s.offset);
  const Array mean(Dtype::f32, rows, 0, false), rstd(Dtype::f32, rows, 0, false);
  ScaledAddNormForward f{};
  f.kind = kind, f.rows = rows, f.cols = cols, f.epsilon = 1e-6f, f.weight_rows = s.weight_rows;
  f.x = x, f.scale = scale, f.y = y, f.y_stride = cols + s.pad, f.multiply_before_cast = multiply_before_cast;
  if (kind == Kind::layer) f.bias = bias, f.mean = mean.floats();
  f.rstd = rstd.floats();
  call(static_cast<const NormForward&>(f), "forward");

  const Array dy(y_dtype, rows * (cols + s.pad), s.offset), dx(dtype, size, s.offset, false);
  const Array dscale(weight, weights, offset_of_sums, false), dbias(weight, weights, offset_of_sums, false);
  const Array dsum(dtype, size, s.offset);
  NormBackward b{};
  b.kind = kind, b.rows = rows, b.cols = cols, b.weight_rows = s.weight_rows, b.dy_stride = cols + s.pad;
  b.x = x, b.scale = scale, b.dy = dy, b.mean = f.mean, b.rstd = f.rstd, b.dx = dx, b.dscale = dscale;
  if (kind == Kind::layer) b.dbias = dbias;
  call(b, "backward");

  f.addend = sum, f.sum = sum;
  call(f, "forward with an addend");
  f.branch_scale = scale;
  call(f, "forward with a branch's scale");
  if (y_dtype == dtype && s.pad == 0) {
    f.sum = {};
    call(f, "forward without the sum");
  }
  b.x = sum, b.dsum = dsum;
  call(b, "backward with dsum");
  b.dx = {}, b.dsum = {};
  call(b, "backward of weights alone");
}

inline void run_gated(Dtype dtype, bool first, const Shape& s) {
  const int64_t rows = s.rows, cols = s.cols, size = rows * cols, weights = s.weight_rows.count * cols;
  const Array x(dtype, size, s.offset), gate(dtype, size, s.offset), scale(dtype, weights, s.offset);
  const Array y(dtype, size, s.offset, false), rstd(Dtype::f32, rows, 0, false);
  GatedNormForward f{};
  f.rows = rows, f.cols = cols, f.epsilon = 1e-6f, f.x = x, f.scale = scale, f.y = y, f.weight_rows = s.weight_rows;
  f.gate = {gate, first ? Activation::silu : Activation::sigmoid, first}, f.rstd = rstd.floats();
  call(f, "gated forward");

  const Array dy(dtype, size, s.offset), dx(dtype, size, s.offset, false), dgate(dtype, size, s.offset, false);
  const Array dscale(dtype, weights, offset_of_gradients(s.offset), false);
  GatedNormBackward b{};
  b.rows = rows, b.cols = cols, b.weight_rows = s.weight_rows, b.gate = f.gate, b.rstd = f.rstd;
  b.x = x, b.scale = scale, b.dy = dy, b.dx = dx, b.dgate = dgate, b.dscale = dscale;
  call(b, "gated backward");
}

struct HeadsShape {
  int64_t tokens, inner, q_heads, k_heads, cols;
  int64_t dim;        // what is turned of a head
  int64_t positions;  // of neighbouring tokens, which begin anew after as many
  int64_t offset;     // of each array
};

// By tables and by positions; and where one array has q, k and v.
inline void run_rotary(HeadNorm norm, Dtype dtype, const HeadsShape& s) {
  const int64_t tokens = s.tokens, cols = s.cols, offset = s.offset, sums = offset_of_gradients(offset);
  const int64_t q_size = tokens * s.q_heads * cols, k_size = tokens * s.k_heads * cols;
  const Array q(dtype, q_size, offset), k(dtype, k_size, offset), q_out(dtype, q_size, offset, false);
  const Array k_out(dtype, k_size, offset, false), dq_out(dtype, q_size, offset), dk_out(dtype, k_size, offset);
  const Array q_scale(dtype, s.q_heads * cols, offset), k_scale(dtype, cols, offset);
  const Array q_mean(Dtype::f32, tokens * s.q_heads, 0, false), q_rstd(Dtype::f32, tokens * s.q_heads, 0, false);
  const Array k_mean(Dtype::f32, tokens * s.k_heads, 0, false), k_rstd(Dtype::f32, tokens * s.k_heads, 0, false);
  const Array positions(Dtype::f32, s.positions, offset), frequencies(Dtype::f32, s.dim / 2, offset);
  const Array cos(Dtype::f32, s.positions * s.dim / 2, offset), sin(Dtype::f32, s.positions * s.dim / 2, offset);
  const bool normed = norm != HeadNorm::none, layer = norm == HeadNorm::layer;
  QkNormRotaryForward f{};
  f.norm = norm, f.tokens = tokens, f.inner = s.inner, f.cols = cols, f.epsilon = 1e-6f;
  f.q.heads = f.q.x_rows = f.q.y_rows = s.q_heads, f.q.x = q, f.q.y = q_out, f.q.has_scale_per_head = normed;
  f.k.heads = f.k.x_rows = f.k.y_rows = s.k_heads, f.k.x = k, f.k.y = k_out;
  if (normed) f.q.scale = q_scale, f.k.scale = k_scale, f.q.rstd = q_rstd.floats(), f.k.rstd = k_rstd.floats();
  if (layer) f.q.mean = q_mean.floats(), f.k.mean = k_mean.floats();
  const Array dq(dtype, q_size, offset, false), dk(dtype, k_size, offset, false);
  const Array dq_scale(dtype, s.q_heads * cols, sums, false), dk_scale(dtype, cols, sums, false);
  const int64_t rows = s.q_heads + 2 * s.k_heads;  // of a token, where one array has q, k and v
  const Array qkv(dtype, tokens * rows * cols, offset), dqkv(dtype, tokens * rows * cols, offset, false);
  const Array v_out(dtype, k_size, offset, false);
  const auto part = [&](auto array, int64_t head) {
    return array.data = (char*)array.data + head * cols * size_of(dtype), array;
  };
  for (const bool interleaved : {false, true}) {
    f.rotation = {};
    f.rotation.dim = s.dim, f.rotation.interleaved = interleaved, f.rotation.token_rows.inner = {s.positions, 1};
    if (interleaved) f.rotation.cos = cos.floats(), f.rotation.sin = sin.floats();
    if (!interleaved) f.rotation.positions = positions.floats(), f.rotation.frequencies = frequencies.floats();
    call(f, "rotary forward");

    QkNormRotaryBackward b{};
    b.norm = norm, b.tokens = tokens, b.inner = s.inner, b.cols = cols, b.rotation = f.rotation;
    b.q.heads = b.q.x_rows = s.q_heads, b.q.dy = dq_out, b.q.dx = dq, b.q.has_scale_per_head = normed;
    b.k.heads = b.k.x_rows = s.k_heads, b.k.dy = dk_out, b.k.dx = dk;
    if (normed) {
      b.q.x = q, b.q.scale = q_scale, b.q.mean = f.q.mean, b.q.rstd = f.q.rstd, b.q.dscale = dq_scale;
      b.k.x = k, b.k.scale = k_scale, b.k.mean = f.k.mean, b.k.rstd = f.k.rstd, b.k.dscale = dk_scale;
    }
    call(b, "rotary backward");
    if (s.inner > 1) continue;

    QkNormRotaryForward packed = f;
    packed.q.x_rows = packed.k.x_rows = rows;
    packed.q.x = qkv, packed.k.x = part(Input(qkv), s.q_heads);
    packed.v = {rows, s.k_heads, part(Input(qkv), s.q_heads + s.k_heads), v_out};
    call(packed, "packed rotary forward");
    b.q.x_rows = b.k.x_rows = rows;
    b.q.dx = dqkv, b.k.dx = part(Output(dqkv), s.q_heads);
    if (normed) b.q.x = packed.q.x, b.k.x = packed.k.x;
    b.v = {s.k_heads, rows, layer ? Input{} : v_out, part(Output(dqkv), s.q_heads + s.k_heads)};
    call(b, "packed rotary backward");
  }
}

}  // namespace jaxnorm::sanitize
