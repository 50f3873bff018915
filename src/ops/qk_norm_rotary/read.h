// The readers of rotary embedding with the norms of queries and keys, whose rows are those of their last axis. Those of
// packed arrays read the same calls but that q, k and v are one operand, and their gradient one result.
#pragma once

#include <algorithm>
#include <climits>
#include <string>
#include <string_view>
#include <type_traits>

#include "ffi/table.h"
#include "ops/qk_norm_rotary/call.h"

namespace jaxnorm {

// Of q or k: its shape, and that of scales, as of rows of which there is one for each head.
struct HeadShapes {
  RowShapes rows, weights;
  int64_t heads = 0;
};

// `tokens`: as if each had one row. `inner`: how many neighbours there are along the axes after that of the heads.
struct RotaryShapes {
  RowShapes tokens;
  HeadShapes q, k;
  int64_t inner = 1;
  Shape packed;  // of q, k and v as one array; empty: they are apart

  int64_t rows_of(const HeadShapes& part) const { return packed.empty() ? part.heads : packed.end()[-2]; }
};

// Which operands there are beside q and k, and what is the same in both directions.
struct RotaryFlags {
  HeadNorm norm;
  bool q_scale, k_scale, positions, frequencies, cos, sin;

  // How many of these operands there are, and statistics.
  size_t operands() const { return size_t{q_scale} + k_scale + positions + frequencies + cos + sin; }
  size_t statistics() const { return norm == HeadNorm::none ? 0 : norm == HeadNorm::rms ? 2 : 4; }
};

inline RotaryFlags read_rotary_flags(Reader& in) {
  RotaryFlags f{};
  const auto norm = in.attribute<std::string_view>("norm");
  in.require(norm == "none" || norm == "rms" || norm == "layer", "norm is none of \"none\", \"rms\" and \"layer\"");
  f.norm = norm == "none" ? HeadNorm::none : norm == "rms" ? HeadNorm::rms : HeadNorm::layer;
  f.q_scale = in.flag("has_q_scale");
  f.k_scale = in.flag("has_k_scale");
  f.positions = in.flag("has_positions");
  f.frequencies = in.flag("has_frequencies");
  f.cos = in.flag("has_cos");
  f.sin = in.flag("has_sin");
  in.require(f.positions == f.frequencies && f.cos == f.sin && f.positions != f.cos,
             "there are neither positions with frequencies nor cos with sin, or there are both");
  in.require(f.norm != HeadNorm::none || !(f.q_scale || f.k_scale), "there is a scale and no norm");
  return f;
}

// Of q with its heads along `axis`, and of k with as many as that.
inline RotaryShapes rotary_shapes(Reader& in, const Shape& q, int64_t axis, int64_t k_heads) {
  RotaryShapes s;
  const int64_t rank = q.size(), cols = q.back();
  if (cols > kRotaryCols) {
    in.fail("rows are of " + std::to_string(cols) + " elements, expected at most " + std::to_string(kRotaryCols));
  }
  for (int64_t i = axis + 1; i < rank - 1; ++i) s.inner *= q[i];
  s.inner = std::max<int64_t>(1, s.inner);
  s.tokens.x = q;
  s.tokens.x.erase(s.tokens.x.begin() + axis);
  s.tokens.statistics = s.tokens.x;
  s.tokens.statistics.back() = 1;
  s.tokens.axes = 1;
  s.tokens.cols = cols;
  for (size_t i = 0; i + 1 < s.tokens.x.size(); ++i) s.tokens.rows *= s.tokens.x[i];
  for (HeadShapes* heads : {&s.q, &s.k}) {
    heads->heads = heads == &s.q ? q[axis] : k_heads;
    heads->rows.x = q;
    heads->rows.x[axis] = heads->heads;
    heads->rows.statistics = heads->rows.x;
    heads->rows.statistics.back() = 1;
    heads->weights.x = {heads->heads, cols};
    heads->weights.weight = {cols};
    heads->weights.axes = 1;
    heads->weights.cols = cols;
  }
  return s;
}

// Of q and k, or of their cotangents, the operands of these indices.
inline RotaryShapes read_rotary_shapes(Reader& in, size_t q_index, size_t k_index) {
  const Shape q = in.rows(1, q_index).x, k = in.rows(1, k_index).x;
  const int64_t rank = q.size(), axis = rank + in.attribute<int64_t>("heads_axis");
  if (axis < 0 || axis > rank - 2 || k.size() != q.size()) {
    in.fail("q is " + text(q) + " and k is " + text(k) + ", expected one rank, with an axis of heads");
    return {};
  }
  const RotaryShapes s = rotary_shapes(in, q, axis, k[axis]);
  const Shape& expected = s.k.rows.x;
  if (k != expected) in.fail("k is " + text(k) + ", expected " + text(expected) + " as q is " + text(q));
  return s;
}

// Of the packed array or of the cotangent of q, the first operand: how many heads it has is seen when it is read.
inline RotaryShapes read_packed_shapes(Reader& in) {
  Shape q = in.rows(1).x;
  const int64_t rank = q.size(), heads = in.attribute<int64_t>("heads"), kv_heads = in.attribute<int64_t>("kv_heads");
  if (rank < 2 || std::min(heads, kv_heads) < 0 || std::max(heads, kv_heads) > INT_MAX) {
    in.fail("the heads of " + text(q) + " are " + std::to_string(heads) + " and twice " + std::to_string(kv_heads) +
            ", expected an axis of so many");
    return {};
  }
  q[rank - 2] = heads;
  RotaryShapes s = rotary_shapes(in, q, rank - 2, kv_heads);
  s.packed = q;
  s.packed[rank - 2] = heads + 2 * kv_heads;
  return s;
}

// Hands out the parts of a packed array that are for q and for k; the rest, for v, is returned.
template <class Array>
Array share_out(const RotaryShapes& s, const Array& packed, Array* q, Array* k) {
  using Byte = std::conditional_t<std::is_same_v<Array, Input>, const char, char>;
  const auto from = [&](int64_t head) {
    return packed ? Array{static_cast<Byte*>(packed.data) + head * s.tokens.cols * size_of(packed.dtype), packed.dtype}
                  : packed;
  };
  *q = packed;
  *k = from(s.q.heads);
  return from(s.q.heads + s.k.heads);
}

// A scale for all heads or one for each.
inline Input read_head_scale(Reader& in, const char* name, bool is_there, HeadShapes& heads, bool* has_scale_per_head) {
  if (!is_there) return {};
  const Input scale = in.weight(name, heads.weights);
  *has_scale_per_head = heads.weights.weight_rows.count > 1;
  return scale;
}

inline Rotation read_rotation(Reader& in, const RotaryFlags& flags, const RowShapes& tokens) {
  Rotation r;
  r.dim = in.attribute<int64_t>("rotary_dim");
  r.interleaved = in.flag("interleaved");
  if (r.dim < 2 || r.dim % 2 != 0 || r.dim > tokens.cols) {
    in.fail("rotary_dim is " + std::to_string(r.dim) + ", expected an even number from 2 to the " +
            std::to_string(tokens.cols) + " elements of a row");
    return r;
  }
  const auto read = [&](const char* name, std::optional<int64_t> cols, BroadcastRows* map) {
    return static_cast<const float*>(in.broadcast_operand(name, tokens, cols, ffi::F32, map));
  };
  if (flags.positions) r.positions = read("positions", std::nullopt, &r.token_rows);
  if (flags.frequencies) r.frequencies = in.f32_operand("frequencies", {r.dim / 2});
  BroadcastRows sin_rows;
  if (flags.cos) r.cos = read("cos", r.dim / 2, &r.token_rows);
  if (flags.sin) r.sin = read("sin", r.dim / 2, &sin_rows);
  const auto are_equal = [](RowMap a, RowMap b) { return a.count == b.count && a.inner == b.inner; };
  in.require(
      !flags.cos || (are_equal(r.token_rows.outer, sin_rows.outer) && are_equal(r.token_rows.inner, sin_rows.inner)),
      "cos and sin have different shapes");
  return r;
}

template <bool PACKED>
QkNormRotaryForward read_qk_norm_rotary(Reader& in) {
  RotaryShapes s = PACKED ? read_packed_shapes(in) : read_rotary_shapes(in, 0, 1);
  const RotaryFlags flags = read_rotary_flags(in);
  QkNormRotaryForward p{};
  p.norm = flags.norm;
  p.tokens = s.tokens.rows;
  p.inner = s.inner;
  p.cols = s.tokens.cols;
  p.epsilon = in.attribute<float>("epsilon");
  p.scale_offset = in.attribute<float>("scale_offset");
  p.q.heads = p.q.y_rows = s.q.heads;
  p.k.heads = p.k.y_rows = p.v.y_rows = s.k.heads;
  p.q.x_rows = s.rows_of(s.q);
  p.k.x_rows = p.v.x_rows = s.rows_of(s.k);
  if (PACKED) {
    p.v.x = share_out(s, in.operand("qkv", s.packed), &p.q.x, &p.k.x);
  } else {
    p.q.x = in.operand("q", s.q.rows.x);
    p.k.x = in.operand("k", s.k.rows.x, p.q.x.dtype);
  }
  const Dtype dtype = p.q.x.dtype;
  p.q.scale = read_head_scale(in, "q_scale", flags.q_scale, s.q, &p.q.has_scale_per_head);
  p.k.scale = read_head_scale(in, "k_scale", flags.k_scale, s.k, &p.k.has_scale_per_head);
  p.rotation = read_rotation(in, flags, s.tokens);
  p.q.y = in.result("q_out", s.q.rows.x, dtype);
  p.k.y = in.result("k_out", s.k.rows.x, dtype);
  if (PACKED && in.flag("with_v")) p.v.y = in.result("v_out", s.k.rows.x, dtype);
  if (flags.norm == HeadNorm::none || !in.has_result(s.q.rows.statistics)) return p;
  const bool layer = flags.norm == HeadNorm::layer;
  if (layer) p.q.mean = in.f32_result("q_mean", s.q.rows.statistics);
  p.q.rstd = in.f32_result("q_rstd", s.q.rows.statistics);
  if (layer) p.k.mean = in.f32_result("k_mean", s.k.rows.statistics);
  p.k.rstd = in.f32_result("k_rstd", s.k.rows.statistics);
  return p;
}

// Without a norm there may be q and k, which are not read.
template <bool PACKED>
QkNormRotaryBackward read_qk_norm_rotary_grad(Reader& in) {
  const bool has_q = in.flag(PACKED ? "has_qkv" : "has_q"), has_k = PACKED ? has_q : in.flag("has_k");
  const RotaryFlags flags = read_rotary_flags(in);
  const bool normed = flags.norm != HeadNorm::none, layer = flags.norm == HeadNorm::layer;
  in.require((has_q && has_k) || !normed, "there is a norm, and q or k is missing");
  const size_t k_index = size_t{1} + has_q + has_k + flags.operands() + flags.statistics();
  RotaryShapes s = PACKED ? read_packed_shapes(in) : read_rotary_shapes(in, 0, k_index);
  QkNormRotaryBackward p{};
  p.norm = flags.norm;
  p.tokens = s.tokens.rows;
  p.inner = s.inner;
  p.cols = s.tokens.cols;
  p.scale_offset = in.attribute<float>("scale_offset");
  p.q.heads = s.q.heads;
  p.k.heads = p.v.x_rows = s.k.heads;
  p.q.x_rows = s.rows_of(s.q);
  p.k.x_rows = p.v.y_rows = s.rows_of(s.k);
  p.q.dy = in.operand("dq_out", s.q.rows.x);
  const Dtype dtype = p.q.dy.dtype;
  if (PACKED && has_q) {
    share_out(s, in.operand("qkv", s.packed, dtype), &p.q.x, &p.k.x);
  } else {
    if (has_q) p.q.x = in.operand("q", s.q.rows.x, dtype);
    if (has_k) p.k.x = in.operand("k", s.k.rows.x, dtype);
  }
  p.q.scale = read_head_scale(in, "q_scale", flags.q_scale, s.q, &p.q.has_scale_per_head);
  p.k.scale = read_head_scale(in, "k_scale", flags.k_scale, s.k, &p.k.has_scale_per_head);
  p.rotation = read_rotation(in, flags, s.tokens);
  if (layer) p.q.mean = in.f32_operand("q_mean", s.q.rows.statistics);
  if (normed) p.q.rstd = in.f32_operand("q_rstd", s.q.rows.statistics);
  if (layer) p.k.mean = in.f32_operand("k_mean", s.k.rows.statistics);
  if (normed) p.k.rstd = in.f32_operand("k_rstd", s.k.rows.statistics);
  p.k.dy = in.operand("dk_out", s.k.rows.x, dtype);
  if (PACKED) {
    if (in.flag("has_dv_out")) p.v.x = in.operand("dv_out", s.k.rows.x, dtype);
    if (in.flag("with_dqkv")) p.v.y = share_out(s, in.result("dqkv", s.packed, dtype), &p.q.dx, &p.k.dx);
  } else {
    if (in.flag("with_dq")) p.q.dx = in.result("dq", s.q.rows.x, dtype);
    if (in.flag("with_dk")) p.k.dx = in.result("dk", s.k.rows.x, dtype);
  }
  const bool with_dq_scale = in.flag("with_dq_scale"), with_dk_scale = in.flag("with_dk_scale");
  in.require((p.q.scale || !with_dq_scale) && (p.k.scale || !with_dk_scale), "dscale is wanted and there is no scale");
  if (with_dq_scale) p.q.dscale = in.weight_result("dq_scale", s.q.weights, p.q.scale.dtype);
  if (with_dk_scale) p.k.dscale = in.weight_result("dk_scale", s.k.weights, p.k.scale.dtype);
  p.workspace = in.workspace();
  return p;
}

namespace ops::qk_norm_rotary {

template <class Platform>
inline constexpr std::tuple kTable{
    Row{"jaxnorm_qk_norm_rotary_fwd", read_qk_norm_rotary<false>},
    Row{"jaxnorm_qk_norm_rotary_bwd", read_qk_norm_rotary_grad<false>,
        Platform::workspace(cuda::qk_norm_rotary_grad_workspace)},
    Row{"jaxnorm_qkv_norm_rotary_fwd", read_qk_norm_rotary<true>},
    Row{"jaxnorm_qkv_norm_rotary_bwd", read_qk_norm_rotary_grad<true>,
        Platform::workspace(cuda::qk_norm_rotary_grad_workspace)},
    Limit{"rotary_cols", kRotaryCols},
};

}  // namespace ops::qk_norm_rotary

}  // namespace jaxnorm
