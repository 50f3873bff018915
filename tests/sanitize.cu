// Every regime of the CUDA kernels without Python, for compute-sanitizer, whose tools but memcheck do not get along
// with a whole JAX process:
//
//   cmake -D JAXNORM_UNITS=units -P cmake/units.cmake
//   nvcc -std=c++17 -O3 --fmad=false -arch=native -Isrc tests/sanitize.cu units/*.cu src/engine/cuda/*.cu
//     src/engine/cuda/*.cc src/ops/*/cuda/*.cu src/ops/*/cuda/*.cc -o sanitize       # on one line
//   for tool in memcheck racecheck synccheck initcheck; do compute-sanitizer --tool $tool ./sanitize; done
//   compute-sanitizer --tool racecheck ./sanitize layer bf16            # a part of them
//   compute-sanitizer --tool racecheck ./sanitize layer bf16 37 4096    # one shape, rows by columns
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <vector>

#include "engine/cuda/device.h"
#include "engine/cuda/plan.h"
#include "ops/cross_entropy/call.h"
#include "ops/gated_activation/call.h"
#include "ops/norm/call.h"
#include "ops/qk_norm_rotary/call.h"
#include "ops/quantize/call.h"
#include "ops/sample/call.h"
#include "ops/segment_sum/call.h"
#include "ops/softmax/call.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

// What runs.
struct {
  Kind kind;
  Dtype dtype;
  int64_t rows, cols;
} now;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s, %s %s %lldx%lld: %s\n", what, now.kind == Kind::rms ? "rms" : "layer",
              now.dtype == Dtype::f32 ? "f32" : "bf16", static_cast<long long>(now.rows),
              static_cast<long long>(now.cols), cudaGetErrorString(error));
  std::exit(1);
}

// An array of its own allocation, so that a tool sees what lies beside it; inputs hold a pattern of small numbers, as
// do the other bytes of words with elements, which are read whole. `offset`: in elements, so that it is aligned to them
// and to nothing more.
class Array {
 public:
  Array(Dtype dtype, int64_t elements, int64_t offset, bool is_input = true)
      : dtype_(dtype), offset_(offset * size_of(dtype)) {
    const size_t end = elements * size_of(dtype) + offset_, bytes = (end + 15) / 16 * 16;
    check(cudaMalloc(&data_, bytes ? bytes : 1), "cudaMalloc");
    // 0.0115 as f32, 1.06 as f16, 0.0115 as bf16
    check(cudaMemset(data_, 0x3c, is_input ? bytes : offset_), "cudaMemset");
    check(cudaMemset(data_ + end, 0x3c, bytes - end), "cudaMemset");
  }
  ~Array() { cudaFree(data_); }
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

int64_t workspace_floats(const NormForward&) { return 1; }  // for tickets

int64_t workspace_floats(const NormBackward& p) {
  const int weights = p.kind == Kind::layer ? 2 : 1;
  const WorkspaceSize size = norm_grad_workspace({p.x.dtype, p.cols, weights, p.weight_rows, bool{p.dx}});
  return p.rows * size.floats_a_row + size.floats;
}

int64_t workspace_floats(const GatedNormBackward& p) {
  return gated_norm_grad_workspace({p.x.dtype, p.cols, 1, p.weight_rows, true}).floats;
}

int64_t workspace_floats(const SegmentSum& p) {
  const WorkspaceSize size = segment_sum_workspace({Dtype::f32, p.cols});
  return (int64_t{p.positions} + p.segments) * size.floats_a_row + size.floats;
}

int64_t workspace_floats(const QkNormRotaryBackward& p) {
  return qk_norm_rotary_grad_workspace({p.q.dx.dtype, p.cols, 2, {p.q.heads, 1}, true}).floats;
}

template <class Op, class = void>
constexpr bool has_workspace = false;
template <class Op>
constexpr bool has_workspace<Op, std::void_t<decltype(workspace_floats(std::declval<const Op&>()))>> = true;

// Runs an op to its end: a kernel that fails is named by what launched it.
template <class Op>
void call(const Op& op, const char* what) {
  const auto finish = [&](const Op& op) {
    check(cuda::run(op, Stream{}), what);
    check(cudaDeviceSynchronize(), what);
  };
  if constexpr (has_workspace<Op>) {
    const int64_t floats = workspace_floats(op);
    const Array workspace(Dtype::f32, floats, 0, false);
    Op with_workspace = op;
    with_workspace.workspace = {workspace.floats(), floats};
    finish(with_workspace);
  } else {
    finish(op);
  }
}

struct Shape {
  int64_t rows, cols;
  int64_t offset = 0;  // of each array
  RowMap weight_rows = {};
  int64_t pad = 0;  // columns after each row of y and dy
};

// Forward and backward, alone and of a sum that takes the addend's place.
void run_norm(Kind kind, Dtype dtype, const Shape& s) {
  const int64_t rows = s.rows, cols = s.cols, size = rows * cols, weights = s.weight_rows.count * cols;
  const Array x(dtype, size, s.offset), scale(dtype, weights, s.offset), bias(dtype, weights, s.offset);
  const Array y(dtype, rows * (cols + s.pad), s.offset, false), sum(dtype, size, s.offset);
  const Array mean(Dtype::f32, rows, 0, false), rstd(Dtype::f32, rows, 0, false);
  ScaledAddNormForward f{};
  f.kind = kind, f.rows = rows, f.cols = cols, f.epsilon = 1e-6f, f.weight_rows = s.weight_rows;
  f.x = x, f.scale = scale, f.y = y, f.y_stride = cols + s.pad;
  if (kind == Kind::layer) f.bias = bias, f.mean = mean.floats();
  f.rstd = rstd.floats();
  call(static_cast<const NormForward&>(f), "forward");

  const Array dy(dtype, rows * (cols + s.pad), s.offset), dx(dtype, size, s.offset, false);
  const Array dscale(dtype, weights, 0, false), dbias(dtype, weights, 0, false);
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
  if (s.pad == 0) {
    f.sum = {};
    call(f, "forward without the sum");
  }
  b.x = sum, b.dsum = dsum;
  call(b, "backward with dsum");
  b.dx = {}, b.dsum = {};
  call(b, "backward of weights alone");
}

// Gated, in both orders.
void run_gated(Dtype dtype, const Shape& s) {
  now = {Kind::rms, dtype, s.rows, s.cols};
  for (const bool first : {false, true}) {
    const int64_t rows = s.rows, cols = s.cols, size = rows * cols, weights = s.weight_rows.count * cols;
    const Array x(dtype, size, s.offset), gate(dtype, size, s.offset), scale(dtype, weights, s.offset);
    const Array y(dtype, size, s.offset, false), rstd(Dtype::f32, rows, 0, false);
    GatedNormForward f{};
    f.rows = rows, f.cols = cols, f.epsilon = 1e-6f, f.x = x, f.scale = scale, f.y = y, f.weight_rows = s.weight_rows;
    f.gate = {gate, first ? Activation::silu : Activation::sigmoid, first}, f.rstd = rstd.floats();
    call(f, "gated forward");

    const Array dy(dtype, size, s.offset), dx(dtype, size, s.offset, false), dgate(dtype, size, s.offset, false);
    const Array dscale(dtype, weights, 0, false);
    GatedNormBackward b{};
    b.rows = rows, b.cols = cols, b.weight_rows = s.weight_rows, b.gate = f.gate, b.rstd = f.rstd;
    b.x = x, b.scale = scale, b.dy = dy, b.dx = dx, b.dgate = dgate, b.dscale = dscale;
    call(b, "gated backward");
  }
}

// By tables and by positions; and where one array has q, k and v. `dim`: what is turned of a head.
void run_rotary(HeadNorm norm, Dtype dtype, int64_t tokens, int64_t inner, int64_t cols, int64_t dim, int64_t offset) {
  now = {norm == HeadNorm::layer ? Kind::layer : Kind::rms, dtype, tokens, cols};
  constexpr int64_t q_heads = 9, k_heads = 2;
  const int64_t q_size = tokens * q_heads * cols, k_size = tokens * k_heads * cols;
  const Array q(dtype, q_size, offset), k(dtype, k_size, offset), q_out(dtype, q_size, offset, false);
  const Array k_out(dtype, k_size, offset, false), dq_out(dtype, q_size, offset), dk_out(dtype, k_size, offset);
  const Array q_scale(dtype, q_heads * cols, offset), k_scale(dtype, cols, offset);
  const Array q_mean(Dtype::f32, tokens * q_heads, 0, false), q_rstd(Dtype::f32, tokens * q_heads, 0, false);
  const Array k_mean(Dtype::f32, tokens * k_heads, 0, false), k_rstd(Dtype::f32, tokens * k_heads, 0, false);
  const Array positions(Dtype::f32, tokens, offset), frequencies(Dtype::f32, dim / 2, offset);
  const Array cos(Dtype::f32, tokens * dim / 2, offset), sin(Dtype::f32, tokens * dim / 2, offset);
  const bool normed = norm != HeadNorm::none, layer = norm == HeadNorm::layer;
  QkNormRotaryForward f{};
  f.norm = norm, f.tokens = tokens, f.inner = inner, f.cols = cols, f.epsilon = 1e-6f;
  f.q.heads = f.q.x_rows = f.q.y_rows = q_heads, f.q.x = q, f.q.y = q_out, f.q.has_scale_per_head = normed;
  f.k.heads = f.k.x_rows = f.k.y_rows = k_heads, f.k.x = k, f.k.y = k_out;
  if (normed) f.q.scale = q_scale, f.k.scale = k_scale, f.q.rstd = q_rstd.floats(), f.k.rstd = k_rstd.floats();
  if (layer) f.q.mean = q_mean.floats(), f.k.mean = k_mean.floats();
  const Array dq(dtype, q_size, offset, false), dk(dtype, k_size, offset, false);
  const Array dq_scale(dtype, q_heads * cols, 0, false), dk_scale(dtype, cols, 0, false);
  const int64_t rows = q_heads + 2 * k_heads;  // of a token, where one array has q, k and v
  const Array qkv(dtype, tokens * rows * cols, offset), dqkv(dtype, tokens * rows * cols, offset, false);
  const Array v_out(dtype, k_size, offset, false);
  const auto part = [&](auto array, int64_t head) {
    return array.data = (char*)array.data + head * cols * size_of(dtype), array;
  };
  for (const bool interleaved : {false, true}) {
    f.rotation = {};
    f.rotation.dim = dim, f.rotation.interleaved = interleaved, f.rotation.token_rows.inner = {tokens, 1};
    if (interleaved) f.rotation.cos = cos.floats(), f.rotation.sin = sin.floats();
    if (!interleaved) f.rotation.positions = positions.floats(), f.rotation.frequencies = frequencies.floats();
    call(f, "rotary forward");

    QkNormRotaryBackward b{};
    b.norm = norm, b.tokens = tokens, b.inner = inner, b.cols = cols, b.rotation = f.rotation;
    b.q.heads = b.q.x_rows = q_heads, b.q.dy = dq_out, b.q.dx = dq, b.q.has_scale_per_head = normed;
    b.k.heads = b.k.x_rows = k_heads, b.k.dy = dk_out, b.k.dx = dk;
    if (normed) {
      b.q.x = q, b.q.scale = q_scale, b.q.mean = f.q.mean, b.q.rstd = f.q.rstd, b.q.dscale = dq_scale;
      b.k.x = k, b.k.scale = k_scale, b.k.mean = f.k.mean, b.k.rstd = f.k.rstd, b.k.dscale = dk_scale;
    }
    call(b, "rotary backward");
    if (inner > 1) continue;

    QkNormRotaryForward packed = f;
    packed.q.x_rows = packed.k.x_rows = rows;
    packed.q.x = qkv, packed.k.x = part(Input(qkv), q_heads);
    packed.v = {rows, k_heads, part(Input(qkv), q_heads + k_heads), v_out};
    call(packed, "packed rotary forward");
    b.q.x_rows = b.k.x_rows = rows;
    b.q.dx = dqkv, b.k.dx = part(Output(dqkv), q_heads);
    if (normed) b.q.x = packed.q.x, b.k.x = packed.k.x;
    b.v = {k_heads, rows, layer ? Input{} : v_out, part(Output(dqkv), q_heads + k_heads)};
    call(b, "packed rotary backward");
  }
}

// The norm as shards of rows.
void run_shards(Kind kind, Dtype dtype, const Shape& s) {
  const Array x(dtype, s.rows * s.cols, s.offset), y(dtype, s.rows * s.cols, s.offset, false);
  const Array scale(dtype, s.cols, s.offset), bias(dtype, s.cols, s.offset);
  const Array mean(Dtype::f32, s.rows, 0, false), rstd(Dtype::f32, s.rows, 0, false);
  call(ShardStatistics{kind, s.rows, s.cols, x, mean.floats(), rstd.floats()}, "statistics");
  const bool centres = kind == Kind::layer;
  call(ShardApply{kind, s.rows, s.cols, x, scale, centres ? Input(bias) : Input{}, y, centres ? mean.floats() : nullptr,
                  rstd.floats(), 0.0f, true},
       "apply");
}

// `pad`: columns after each row of y and dy.
void run(Kind kind, Dtype dtype, int64_t rows, int64_t cols, int64_t offset, const RowMap& weight_rows = {},
         int64_t pad = 0) {
  now = {kind, dtype, rows, cols};
  run_norm(kind, dtype, {rows, cols, offset, weight_rows, pad});
  if (weight_rows.count == 1 && pad == 0) run_shards(kind, dtype, {rows, cols, offset});
}

// Quantised results, with a scale for each row, for groups and given; without an addend and with one.
void run_quantized(Kind kind, Dtype dtype, int64_t rows, int64_t cols, int64_t offset) {
  now = {kind, dtype, rows, cols};
  const Array x(dtype, rows * cols, offset, true), scale(dtype, cols, offset, true), bias(dtype, cols, offset, true);
  const Array sum(dtype, rows * cols, offset, true), smooth(Dtype::f32, cols, offset, true);
  const Array scales(Dtype::f32, rows * cols, 0, false), given(Dtype::f32, 1, 0, true);
  constexpr Dtype formats[] = {Dtype::f8e4m3fn, Dtype::f8e5m2, Dtype::s8};
  int turn = 0;
  for (const bool adds : {false, true})
    for (const int64_t group : {int64_t{0}, int64_t{64}, int64_t{128}, cols}) {
      if (group && cols % group) continue;
      const Dtype format = formats[turn++ % 3];
      const Array values(format, rows * cols, offset, false);
      ScaledAddQuantizedNormForward f{};
      f.kind = kind, f.rows = rows, f.cols = cols, f.epsilon = 1e-6f, f.x = x, f.scale = scale;
      if (kind == Kind::layer) f.bias = bias;
      if (adds) f.addend = sum, f.sum = sum;
      f.quantized.values = values, f.quantized.smooth = smooth;
      f.quantized.group = group ? group : cols, f.quantized.max_scale = INFINITY;
      if (group) {
        f.quantized.scales = scales.floats();
      } else {
        f.quantized.given = given.floats();
      }
      call(f, "quantised forward");
    }
}

// `packed`: whether one array holds gate and up.
void run_gated_activation(Dtype dtype, int64_t rows, int64_t cols, bool packed, int64_t offset) {
  now = {Kind::rms, dtype, rows, cols};
  const GatedShape shape{rows, cols, packed ? 2 * cols : cols};
  const Array x(dtype, 2 * rows * cols, offset, true), dy(dtype, rows * cols, offset, true);
  const Array y(dtype, rows * cols, offset, false), dx(dtype, 2 * rows * cols, offset, false);
  const int64_t second = (packed ? cols : rows * cols) * size_of(dtype);
  const Input gate = x, up{static_cast<char*>(x.get()) + second, dtype};
  const Output dgate = dx, dup{static_cast<char*>(dx.get()) + second, dtype};
  for (const Activation activation : {Activation::silu, Activation::gelu_exact}) {
    call(GatedActivationForward{shape, gate, up, y, activation}, "gated activation");
    call(GatedActivationBackward{shape, dy, gate, up, dgate, dup, activation}, "gradient of a gated activation");
  }
  for (const int64_t group : {cols, int64_t{128}}) {
    if (cols % group != 0) continue;
    const Array values(Dtype::s8, rows * cols, offset, false), scales(Dtype::f32, rows * (cols / group), 0, false);
    Quantization quantized{values, scales.floats()};
    quantized.group = group, quantized.max_scale = INFINITY;
    call(QuantizeForward{rows * (cols / group), group, x, quantized}, "quantize");
    call(GatedActivationQuantizedForward{shape, gate, up, quantized, Activation::silu}, "quantised gated activation");
  }
}

constexpr int64_t kStarts = 5;

// Where rows of so many columns end that have a window, or windows begin, as in programs of before: row r goes with
// number r % kStarts.
struct Starts : Array {
  explicit Starts(int64_t cols) : Array(Dtype::f32, kStarts, 0, false) {
    const int32_t last = static_cast<int32_t>(cols), from[kStarts] = {-1, 3, last / 2, last - 1, last};
    check(cudaMemcpy(get(), from, sizeof from, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  void add_to(Mask& mask, int32_t window = 0) const {
    const auto numbers = static_cast<const int32_t*>(get());
    if (window == 0) mask.starts = numbers, mask.starts_rows = {{}, {kStarts, 1}};
    if (window > 0) mask.lengths = numbers, mask.lengths_rows.inner = {kStarts, 1}, mask.window = window;
  }
};

// Softmax and log-softmax of rows of attention, and cross-entropy, each without a mask and with one.
void run_softmax(Dtype dtype, int64_t rows, int64_t cols, int64_t offset) {
  now = {Kind::rms, dtype, rows, cols};
  constexpr int64_t queries = 5;
  const Array x(dtype, rows * cols, offset, true), y(dtype, rows * cols, offset, false);
  const Array wide(Dtype::f32, rows * cols, offset, false), log_sum(Dtype::f32, rows, 0, false);
  const Array label_logit(Dtype::f32, rows, 0, false), total(Dtype::f32, rows, 0, false);
  const Array top(Dtype::f32, rows, 0, false);
  const Array where(Dtype::s8, queries * cols, offset, true), lengths(Dtype::f32, queries, 0, true);
  const Array labels(Dtype::f32, rows, 0, true);
  check(cudaMemset(labels.get(), 0, (rows - 1) * 4), "cudaMemset");  // but for the last one, which names no column
  check(cudaMemset(lengths.get(), 0, 4), "cudaMemset");
  const Starts starts(cols);
  for (const int masks : {0, 1, 2, 3, 6, 7, 10, 11}) {
    SoftmaxForward f{};
    f.rows = rows, f.cols = cols, f.scale = 0.5f, f.x = x;
    if (masks & 1) f.mask.where = static_cast<const uint8_t*>(where.get()), f.mask.where_rows.inner = {queries, 1};
    if (masks & 2)
      f.mask.lengths = static_cast<const int32_t*>(lengths.get()), f.mask.lengths_rows.inner = {queries, 1};
    if (masks & 4) starts.add_to(f.mask);
    if (masks & 8) starts.add_to(f.mask, 9);
    f.log = masks % 3 == 0, f.log_sum = f.log ? log_sum.floats() : nullptr, f.top = f.log ? top.floats() : nullptr;
    f.y = y;
    call(f, "softmax");
    f.y = wide;
    call(f, "softmax to f32");

    if (masks & 2) continue;
    CrossEntropyForward c{};
    c.rows = rows, c.cols = cols, c.scale = 1, c.soft_cap = masks ? 30.0f : 0, c.x = f.x, c.mask = f.mask;
    c.labels = static_cast<const int32_t*>(labels.get());
    c.log_sum = log_sum.floats(), c.label_logit = label_logit.floats(), c.total = masks ? total.floats() : nullptr;
    c.top = top.floats();
    call(c, "cross-entropy");
  }
}

// The gradients of softmax, log-softmax and cross-entropy, without a mask and with one.
void run_softmax_grad(Dtype dtype, int64_t rows, int64_t cols, int64_t offset) {
  now = {Kind::rms, dtype, rows, cols};
  const Array x(dtype, rows * cols, offset, true), dy(dtype, rows * cols, offset, true);
  const Array dx(dtype, rows * cols, offset, false), numbers(Dtype::f32, rows, 0, true);
  const Array where(Dtype::f32, (cols + 3) / 4, 0, true), lengths(Dtype::f32, rows, 0, true);
  const auto floats = numbers.floats();
  const auto integers = static_cast<const int32_t*>(lengths.get());
  const Starts starts(cols);
  for (const int masks : {0, 1, 2, 3}) {
    const bool masked = masks > 0;
    Mask mask{};
    if (masked) mask.lengths = integers, mask.lengths_rows.inner = {rows, 1};
    if (masks > 1) starts.add_to(mask, masks == 2 ? 0 : 9);
    if (masked) mask.where = static_cast<const uint8_t*>(where.get());
    const SoftmaxBackward softmax{rows, cols, dy, x, mask, dx, 0.5f};
    call(softmax, "softmax backward");
    SoftmaxBackward wide = softmax;
    const Array other(dtype == Dtype::f32 ? Dtype::bf16 : Dtype::f32, rows * cols, offset, false);
    wide.dx = other;
    call(wide, "softmax backward to another type");
    const LogSoftmaxBackward log{rows, cols, dy, x, mask, floats, floats, dx, 0.5f};
    call(log, "log-softmax backward");
    CrossEntropyBackward loss{};
    loss.rows = rows, loss.cols = cols, loss.x = log.x, loss.labels = integers, loss.mask = mask, loss.scale = 0.5f;
    loss.mask.lengths = loss.mask.starts = nullptr, loss.mask.window = 0, loss.soft_cap = masked ? 30.0f : 0.0f,
    loss.log_sum = loss.dlog_sum = loss.top = floats;
    loss.dlabel_logit = loss.dtotal = floats, loss.dx = log.dx;
    call(loss, "cross-entropy backward");
    loss.dx = x;
    call(loss, "cross-entropy backward in place");
  }
}

// Sums of segments of so many positions each, in order and by an order, from nothing and onto what is there.
void run_segments(Dtype dtype, int32_t positions, int32_t segments, int64_t cols, int64_t offset) {
  now = {Kind::rms, dtype, positions, cols};
  const Array data(dtype, positions * cols, offset), sums(Dtype::f32, segments * cols, offset, false);
  const Array onto(Dtype::f32, segments * cols, offset), ids(Dtype::f32, positions, 0), order(Dtype::f32, positions, 0);
  std::vector<int32_t> in_order(positions), numbers(positions);
  for (int32_t i = 0; i < positions; ++i) in_order[i] = i, numbers[i] = int32_t(int64_t{i} * segments / positions);
  check(cudaMemcpy(order.get(), in_order.data(), positions * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  check(cudaMemcpy(ids.get(), numbers.data(), positions * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  SegmentSum p{positions, segments, cols, data, static_cast<const int32_t*>(ids.get())};
  p.sums = sums;
  call(p, "segment sum");
  p.order = static_cast<const int32_t*>(order.get()), p.is_added = true, p.onto = onto;
  call(p, "segment sum onto another array");
  p.onto = sums;
  call(p, "segment sum in place");
}

// The next token of rows, greedy and with every filter, with a mask and without one.
void run_sample(Dtype dtype, int64_t rows, int64_t cols, int64_t offset) {
  now = {Kind::rms, dtype, rows, cols};
  const Array logits(dtype, rows * cols, offset), numbers(Dtype::f32, rows, 0), zeros(Dtype::f32, rows, 0);
  const Array where(Dtype::s8, cols, offset), ids(Dtype::f32, rows, 0, false), log_probs(Dtype::f32, rows, 0, false);
  check(cudaMemset(zeros.get(), 0, rows * 4), "cudaMemset");
  const Array top_k(Dtype::f32, rows, 0);
  check(cudaMemcpy(top_k.get(), std::vector<int32_t>(rows, 50).data(), rows * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  for (const bool is_greedy : {false, true})
    for (const bool masked : {false, true}) {
      Sample p{rows, cols, logits, numbers.floats(), is_greedy ? zeros.floats() : numbers.floats()};
      p.ids = static_cast<int32_t*>(ids.get()), p.log_probs = log_probs.floats();
      if (masked) p.mask.where = static_cast<const uint8_t*>(where.get());
      call(p, "sample");
      p.top_k = static_cast<const int32_t*>(top_k.get()), p.top_p = p.min_p = numbers.floats();
      call(p, "sample with filters");
    }
}

}  // namespace

int main(int argc, char** argv) {
  const auto asked = [&](int i, const char* value) { return argc <= i || std::strcmp(argv[i], value) == 0; };
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const Kind kind : {Kind::rms, Kind::layer}) {
      if (!asked(1, kind == Kind::rms ? "rms" : "layer") || !asked(2, dtype == Dtype::f32 ? "f32" : "bf16")) continue;
      if (argc == 5) {
        const int64_t rows = std::atoll(argv[3]), cols = std::atoll(argv[4]);
        run(kind, dtype, rows, cols, 0);
        run_quantized(kind, dtype, rows, cols, 0);
        if (kind == Kind::layer) continue;
        run_softmax(dtype, rows, cols, 0);
        run_softmax_grad(dtype, rows, cols, 0);
        run_gated_activation(dtype, rows, cols, true, 0);
        run_sample(dtype, rows, cols, 0);
        run_segments(dtype, int32_t(rows), 40, cols, 0);
        if (cols <= kGatedCols) run_gated(dtype, {rows, cols});
        continue;
      }
      // Lengths of every regime, whole vectors and not; rows of a part of a block, and more than run at once.
      for (const int64_t cols : {1, 24, 64, 72, 256, 257, 512, 768, 1024, 1536, 2880, 4096, 4097})
        for (const int64_t rows : {1, 37, 5000}) run(kind, dtype, rows, cols, 0);
      for (const int64_t cols : {8192, 10000, 16384, 30001, 40000, 65536, 100003, 131072, 262144, 300000, 300001})
        for (const int64_t rows : {1, 70}) run(kind, dtype, rows, cols, 0);
      for (const int64_t cols : {64, 1024, 4096, 65536}) run(kind, dtype, 37, cols, 1);
      for (const int64_t cols : {24, 64, 256, 257, 512, 1024, 4096, 12288, 16384, 65536, 262144, 300032})
        for (const int64_t rows : {1, 70}) run_quantized(kind, dtype, rows, cols, 0);
      // No more rows than clusters run at once: where blocks of two clusters of 16 share a multiprocessor, synccheck
      // ends any program (docs/findings.md).
      run_quantized(kind, dtype, 7, 100003, 0);
      run(kind, dtype, 7, 140000, 1);
      for (const int64_t cols : {64, 128, 257, 1024, 4096}) {
        run(kind, dtype, 600, cols, 0, {3, 1});
        run(kind, dtype, 600, cols, 0, {3, 5});
        run(kind, dtype, 240, cols, 0, {40, 3});
      }
      run(kind, dtype, 20000, 128, 0, {8, 500});
      for (const int64_t cols : {128, 1152, 4096}) run(kind, dtype, 4096, cols, 0, {8, 512});
      for (const int64_t cols : {64, 257, 2880, 40000, 100003, 300000}) run(kind, dtype, 37, cols, 0, {}, 64);
      run(kind, dtype, 7, 140000, 0, {}, 64);
      run(kind, dtype, 600, 1024, 0, {}, 1);
      for (const int64_t cols : {64, 1024, 4096, 65536}) run_quantized(kind, dtype, 37, cols, 1);
      if (kind == Kind::layer) continue;
      for (const int64_t cols : {1, 24, 257, 4096, 50257, 151936, 300000})
        for (const int64_t rows : {1, 37}) run_sample(dtype, rows, cols, cols % 2);
      for (const int64_t cols : {1, 24, 100, 768})
        for (const int32_t segments : {1, 40, 4000, 60000}) run_segments(dtype, 5000, segments, cols, cols % 2);
      run_segments(dtype, 1000000, 7, 8, 0);
      for (const int64_t cols : {1, 24, 64, 257, 512, 1024, 4096, 5001, 12288, 30001, 40000, 65536, 262144, 600000})
        for (const int64_t rows : {1, 37}) run_softmax_grad(dtype, rows, cols, 0);
      for (const int64_t cols : {64, 1024, 4096, 65536}) run_softmax_grad(dtype, 37, cols, 1);
      for (const int64_t cols : {24, 64, 100, 128, 256, 512, 1024, 4096, 5120, 8192, 12288, 16384})
        for (const int64_t weight_rows : {1, 8}) run_gated(dtype, {700, cols, 0, {weight_rows, 1}});
      for (const int64_t cols : {64, 1024, 4096}) run_gated(dtype, {37, cols, 1});
      for (const int64_t cols : {1, 24, 100, 768, 1024, 10001, 14336})
        for (const bool packed : {false, true}) run_gated_activation(dtype, 70, cols, packed, 0);
      run_gated_activation(dtype, 37, 1024, true, 1);
      for (const int64_t cols : {1, 24, 64, 100, 256, 512, 1024, 4096, 10000, 16384, 40000, 262144, 300000})
        for (const int64_t rows : {1, 70}) run_softmax(dtype, rows, cols, 0);
      for (const int64_t cols : {64, 1024, 4096}) run_softmax(dtype, 37, cols, 1);
      run_softmax(dtype, 7, 600000, 0);
      for (const HeadNorm norm : {HeadNorm::none, HeadNorm::rms, HeadNorm::layer})
        for (const int64_t cols : {24, 64, 101, 128, 256, 512})
          for (const int64_t dim : {cols / 2 * 2, (cols + 6) / 8 * 2})
            for (const int64_t tokens : {4, 700})
              for (const int64_t inner : {int64_t{1}, tokens / 2})
                run_rotary(norm, dtype, tokens, inner, cols, dim, tokens == 4 && inner > 1);
    }
  std::printf("ran every regime that was asked for\n");
}
