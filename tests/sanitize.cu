// Every regime of the CUDA kernels without Python, for compute-sanitizer, whose tools but memcheck do not get along
// with a whole JAX process:
//
//   cmake -D JAXNORM_UNITS=units -P cmake/units.cmake
//   nvcc -std=c++17 -O3 --fmad=false -arch=native -Isrc tests/sanitize.cu units/*.cu src/cuda/*/*.cu src/cuda/*/*.cc
//     src/cuda/*.cc src/ops/*/cuda/*.cu src/ops/*/cuda/*.cc -o sanitize       # on one line
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

#include "cuda/engine/device.h"
#include "cuda/engine/plan.h"
#include "ops/cross_entropy/cuda.h"
#include "ops/gated_activation/cuda.h"
#include "ops/norm/cuda.h"
#include "ops/qk_norm_rotary/cuda.h"
#include "ops/softmax/cuda.h"

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

// A kernel that fails is named by what launched it.
void finish(cudaError_t error, const char* what) {
  check(error, what);
  check(cudaDeviceSynchronize(), what);
}

// An array of its own allocation, so that a tool sees what lies beside it; inputs hold a pattern of small numbers,
// and so do the other bytes of words with elements, which are read whole.
class Array {
 public:
  Array(Dtype dtype, int64_t elements, int64_t offset, bool is_input) : offset_(offset * size_of(dtype)) {
    const size_t end = elements * size_of(dtype) + offset_, bytes = (end + 15) / 16 * 16;
    check(cudaMalloc(&data_, bytes ? bytes : 1), "cudaMalloc");
    char* const data = static_cast<char*>(data_);
    // 0.0115 as f32, 1.06 as f16, 0.0115 as bf16
    check(cudaMemset(data, 0x3c, is_input ? bytes : offset_), "cudaMemset");
    check(cudaMemset(data + end, 0x3c, bytes - end), "cudaMemset");
  }
  ~Array() { cudaFree(data_); }
  void* get() const { return static_cast<char*>(data_) + offset_; }

 private:
  void* data_ = nullptr;
  int64_t offset_;
};

// `offset`: of each array, in elements, so that it is aligned to them and to nothing more. `pad`: columns after each
// row of y and dy.
void run(Kind kind, Dtype dtype, int64_t rows, int64_t cols, int64_t offset, const RowMap& weight_rows = {},
         int64_t pad = 0) {
  now = {kind, dtype, rows, cols};
  const Array x(dtype, rows * cols, offset, true), dy(dtype, rows * (cols + pad), offset, true);
  const int64_t weights = weight_rows.count * cols;
  const Array scale(dtype, weights, offset, true), bias(dtype, weights, offset, true);
  const Array y(dtype, rows * (cols + pad), offset, false), dx(dtype, rows * cols, offset, false);
  const Array sum(dtype, rows * cols, offset, true), dsum(dtype, rows * cols, offset, true);
  const Array mean(Dtype::f32, rows, 0, false), rstd(Dtype::f32, rows, 0, false), tickets(Dtype::f32, 1, 0, false);
  const Array dscale(dtype, weights, 0, false), dbias(dtype, weights, 0, false);
  const WorkspaceSize size = norm_grad_workspace({dtype, cols, kind == Kind::layer ? 2 : 1, weight_rows, true});
  const int64_t workspace_floats = rows * size.floats_a_row + size.floats;
  const Array workspace(Dtype::f32, workspace_floats, 0, false);
  const auto floats = [](const Array& array) { return static_cast<float*>(array.get()); };

  ScaledAddNormForward f{};
  f.kind = kind, f.rows = rows, f.cols = cols, f.epsilon = 1e-6f, f.multiply_before_cast = true;
  f.x = {x.get(), dtype}, f.scale = {scale.get(), dtype}, f.y = {y.get(), dtype}, f.y_stride = cols + pad;
  if (kind == Kind::layer) f.bias = {bias.get(), dtype};
  f.mean = floats(mean), f.rstd = floats(rstd), f.weight_rows = weight_rows;
  f.workspace = {floats(tickets), 1};
  const NormForward& alone = f;
  finish(jaxnorm::cuda::run(alone, nullptr), "forward");

  NormBackward b{};
  b.kind = kind, b.rows = rows, b.cols = cols;
  b.x = f.x, b.scale = f.scale, b.dy = {dy.get(), dtype}, b.dx = {dx.get(), dtype};
  b.mean = f.mean, b.rstd = f.rstd, b.dscale = {dscale.get(), dtype};
  if (kind == Kind::layer) b.dbias = {dbias.get(), dtype};
  b.workspace = {floats(workspace), workspace_floats}, b.weight_rows = weight_rows, b.dy_stride = cols + pad;
  finish(jaxnorm::cuda::run(b, nullptr), "backward");

  if (weight_rows.count == 1 && pad == 0) {
    // The same as shards of rows.
    finish(jaxnorm::cuda::run(ShardStatistics{kind, rows, cols, f.x, f.mean, f.rstd}, nullptr), "statistics");
    const float* const means = kind == Kind::layer ? f.mean : nullptr;
    const ShardApply apply{kind, rows, cols, f.x, f.scale, f.bias, f.y, means, f.rstd, 0.0f, true};
    finish(jaxnorm::cuda::run(apply, nullptr), "apply");
  }

  // Of an addition, whose sum takes the addend's place.
  f.addend = {sum.get(), dtype}, f.sum = {sum.get(), dtype};
  finish(jaxnorm::cuda::run(f, nullptr), "forward with an addend");
  f.branch_scale = f.scale;
  finish(jaxnorm::cuda::run(f, nullptr), "forward with a branch's scale");
  if (pad == 0) {
    f.sum = {};
    finish(jaxnorm::cuda::run(f, nullptr), "forward without the sum");
  }
  b.x = f.addend, b.dsum = {dsum.get(), dtype};
  finish(jaxnorm::cuda::run(b, nullptr), "backward with dsum");
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
      f.kind = kind, f.rows = rows, f.cols = cols, f.epsilon = 1e-6f, f.weight_rows = {};
      f.x = {x.get(), dtype}, f.scale = {scale.get(), dtype};
      if (kind == Kind::layer) f.bias = {bias.get(), dtype};
      if (adds) f.addend = {sum.get(), dtype}, f.sum = {sum.get(), dtype};
      f.quantized.values = {values.get(), format}, f.quantized.smooth = {smooth.get(), Dtype::f32};
      f.quantized.group = group ? group : cols, f.quantized.max_scale = INFINITY;
      if (group) {
        f.quantized.scales = static_cast<float*>(scales.get());
      } else {
        f.quantized.given = static_cast<const float*>(given.get());
      }
      finish(jaxnorm::cuda::run(f, nullptr), "quantised forward");
    }
}

// Gated, in both orders, with as many heads.
void run_gated(Dtype dtype, int64_t rows, int64_t cols, int64_t weight_rows, int64_t offset) {
  now = {Kind::rms, dtype, rows, cols};
  const Array x(dtype, rows * cols, offset, true), dy(dtype, rows * cols, offset, true);
  const Array gate(dtype, rows * cols, offset, true), scale(dtype, weight_rows * cols, offset, true);
  const Array y(dtype, rows * cols, offset, false), dx(dtype, rows * cols, offset, false);
  const Array dgate(dtype, rows * cols, offset, false), dscale(dtype, weight_rows * cols, 0, false);
  const Array rstd(Dtype::f32, rows, 0, false);
  const int64_t workspace_floats = gated_norm_grad_workspace({dtype, cols, 1, {weight_rows, 1}, true}).floats;
  const Array workspace(Dtype::f32, workspace_floats, 0, false);
  for (const bool first : {false, true}) {
    GatedNormForward f{};
    f.rows = rows, f.cols = cols, f.epsilon = 1e-6f;
    f.x = {x.get(), dtype}, f.scale = {scale.get(), dtype}, f.y = {y.get(), dtype}, f.weight_rows = {weight_rows, 1};
    f.gate = {{gate.get(), dtype}, first ? Activation::silu : Activation::sigmoid, first};
    f.rstd = static_cast<float*>(rstd.get());
    finish(jaxnorm::cuda::run(f, nullptr), "gated forward");

    GatedNormBackward b{};
    b.rows = rows, b.cols = cols, b.weight_rows = f.weight_rows, b.gate = f.gate, b.rstd = f.rstd;
    b.x = f.x, b.scale = f.scale, b.dy = {dy.get(), dtype}, b.dx = {dx.get(), dtype}, b.dgate = {dgate.get(), dtype};
    b.dscale = {dscale.get(), dtype}, b.workspace = {static_cast<float*>(workspace.get()), workspace_floats};
    finish(jaxnorm::cuda::run(b, nullptr), "gated backward");
  }
}

// `packed`: whether one array holds gate and up.
void run_gated_activation(Dtype dtype, int64_t rows, int64_t cols, bool packed, int64_t offset) {
  now = {Kind::rms, dtype, rows, cols};
  const GatedShape shape{rows, cols, packed ? 2 * cols : cols};
  const Array x(dtype, 2 * rows * cols, offset, true), dy(dtype, rows * cols, offset, true);
  const Array y(dtype, rows * cols, offset, false), dx(dtype, 2 * rows * cols, offset, false);
  const int64_t second = (packed ? cols : rows * cols) * size_of(dtype);
  const Input gate{x.get(), dtype}, up{static_cast<char*>(x.get()) + second, dtype};
  const Output dgate{dx.get(), dtype}, dup{static_cast<char*>(dx.get()) + second, dtype};
  for (const Activation activation : {Activation::silu, Activation::gelu_exact}) {
    finish(jaxnorm::cuda::run(GatedActivationForward{shape, gate, up, {y.get(), dtype}, activation}, nullptr),
           "gated activation");
    finish(jaxnorm::cuda::run(GatedActivationBackward{shape, {dy.get(), dtype}, gate, up, dgate, dup, activation},
                              nullptr),
           "gradient of a gated activation");
  }
  for (const int64_t group : {cols, int64_t{128}}) {
    if (cols % group != 0) continue;
    const Array values(Dtype::s8, rows * cols, offset, false), scales(Dtype::f32, rows * (cols / group), 0, false);
    Quantization quantized{{values.get(), Dtype::s8}, static_cast<float*>(scales.get())};
    quantized.group = group, quantized.max_scale = INFINITY;
    finish(jaxnorm::cuda::run(GatedActivationQuantizedForward{shape, gate, up, quantized, Activation::silu}, nullptr),
           "quantised gated activation");
  }
}

constexpr int64_t kStarts = 5;

// Where windows begin, of rows of so many columns: row r goes with start r % kStarts.
struct Starts : Array {
  explicit Starts(int64_t cols) : Array(Dtype::f32, kStarts, 0, false) {
    const int32_t last = static_cast<int32_t>(cols), from[kStarts] = {-1, 3, last / 2, last - 1, last};
    check(cudaMemcpy(get(), from, sizeof from, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  void add_to(Mask& mask) const {
    mask.starts = static_cast<const int32_t*>(get()), mask.starts_rows.inner = {kStarts, 1};
  }
};

// Softmax and log-softmax of rows of attention, and cross-entropy, each without a mask and with one.
void run_softmax(Dtype dtype, int64_t rows, int64_t cols, int64_t offset) {
  now = {Kind::rms, dtype, rows, cols};
  constexpr int64_t queries = 5;
  const Array x(dtype, rows * cols, offset, true), y(dtype, rows * cols, offset, false);
  const Array wide(Dtype::f32, rows * cols, offset, false), log_sum(Dtype::f32, rows, 0, false);
  const Array label_logit(Dtype::f32, rows, 0, false), total(Dtype::f32, rows, 0, false),
      top(Dtype::f32, rows, 0, false);
  const Array where(Dtype::s8, queries * cols, offset, true), lengths(Dtype::f32, queries, 0, true);
  const Array labels(Dtype::f32, rows, 0, true);
  check(cudaMemset(labels.get(), 0, (rows - 1) * 4), "cudaMemset");  // but for the last one, which names no column
  check(cudaMemset(lengths.get(), 0, 4), "cudaMemset");
  const auto floats = [](const Array& array) { return static_cast<float*>(array.get()); };
  const Starts starts(cols);
  for (const int masks : {0, 1, 2, 3, 6, 7}) {
    SoftmaxForward f{};
    f.rows = rows, f.cols = cols, f.scale = 0.5f, f.x = {x.get(), dtype};
    if (masks & 1) f.mask.where = static_cast<const uint8_t*>(where.get()), f.mask.where_rows.inner = {queries, 1};
    if (masks & 2)
      f.mask.lengths = static_cast<const int32_t*>(lengths.get()), f.mask.lengths_rows.inner = {queries, 1};
    if (masks & 4) starts.add_to(f.mask);
    f.log = masks % 3 == 0, f.log_sum = f.log ? floats(log_sum) : nullptr, f.top = f.log ? floats(top) : nullptr;
    f.y = {y.get(), dtype};
    finish(jaxnorm::cuda::run(f, nullptr), "softmax");
    f.y = {wide.get(), Dtype::f32};
    finish(jaxnorm::cuda::run(f, nullptr), "softmax to f32");

    if (masks & 2) continue;
    CrossEntropyForward c{};
    c.rows = rows, c.cols = cols, c.scale = 1, c.soft_cap = masks ? 30.0f : 0, c.x = f.x, c.mask = f.mask;
    c.labels = static_cast<const int32_t*>(labels.get());
    c.log_sum = floats(log_sum), c.label_logit = floats(label_logit), c.total = masks ? floats(total) : nullptr;
    c.top = floats(top);
    finish(jaxnorm::cuda::run(c, nullptr), "cross-entropy");
  }
}

// The gradients of softmax, log-softmax and cross-entropy, without a mask and with one.
void run_softmax_grad(Dtype dtype, int64_t rows, int64_t cols, int64_t offset) {
  now = {Kind::rms, dtype, rows, cols};
  const Array x(dtype, rows * cols, offset, true), dy(dtype, rows * cols, offset, true);
  const Array dx(dtype, rows * cols, offset, false), numbers(Dtype::f32, rows, 0, true);
  const Array where(Dtype::f32, (cols + 3) / 4, 0, true), lengths(Dtype::f32, rows, 0, true);
  const auto floats = static_cast<const float*>(numbers.get());
  const auto integers = static_cast<const int32_t*>(lengths.get());
  const Starts starts(cols);
  for (const int masks : {0, 1, 2}) {
    const bool masked = masks > 0;
    Mask mask;
    if (masks == 2) starts.add_to(mask);
    if (masked) mask.lengths = integers, mask.lengths_rows.inner = {rows, 1};
    if (masked) mask.where = static_cast<const uint8_t*>(where.get());
    const SoftmaxBackward softmax{rows, cols, {dy.get(), dtype}, {x.get(), dtype}, mask, {dx.get(), dtype}, 0.5f};
    finish(jaxnorm::cuda::run(softmax, nullptr), "softmax backward");
    SoftmaxBackward wide = softmax;
    const Array other(dtype == Dtype::f32 ? Dtype::bf16 : Dtype::f32, rows * cols, offset, false);
    wide.dx = {other.get(), dtype == Dtype::f32 ? Dtype::bf16 : Dtype::f32};
    finish(jaxnorm::cuda::run(wide, nullptr), "softmax backward to another type");
    const Input from{x.get(), dtype};
    const LogSoftmaxBackward log{rows, cols, softmax.dy, from, mask, floats, floats, {dx.get(), dtype}, 0.5f};
    finish(jaxnorm::cuda::run(log, nullptr), "log-softmax backward");
    CrossEntropyBackward loss{};
    loss.rows = rows, loss.cols = cols, loss.x = log.x, loss.labels = integers, loss.mask = mask, loss.scale = 0.5f;
    loss.mask.lengths = loss.mask.starts = nullptr, loss.soft_cap = masked ? 30.0f : 0.0f,
    loss.log_sum = loss.dlog_sum = loss.top = floats;
    loss.dlabel_logit = loss.dtotal = floats, loss.dx = log.dx;
    finish(jaxnorm::cuda::run(loss, nullptr), "cross-entropy backward");
    loss.dx = {x.get(), dtype};
    finish(jaxnorm::cuda::run(loss, nullptr), "cross-entropy backward in place");
  }
}

// Heads of a length, of which `dim` elements are turned, by tables and by positions.
void run_rotary(HeadNorm norm, Dtype dtype, int64_t tokens, int64_t inner, int64_t cols, int64_t dim, int64_t offset) {
  now = {norm == HeadNorm::layer ? Kind::layer : Kind::rms, dtype, tokens, cols};
  constexpr int64_t kHeads[] = {9, 2};  // of q and of k
  const bool normed = norm != HeadNorm::none, layer = norm == HeadNorm::layer;
  const Array positions(Dtype::f32, tokens, offset, true), frequencies(Dtype::f32, dim / 2, offset, true);
  const Array cos(Dtype::f32, tokens * dim / 2, offset, true), sin(Dtype::f32, tokens * dim / 2, offset, true);
  const auto floats = [](const Array& array) { return static_cast<float*>(array.get()); };
  const int64_t workspace_floats = qk_norm_rotary_grad_workspace({dtype, cols, 2, {kHeads[0], 1}, true}).floats;
  const Array workspace(Dtype::f32, workspace_floats, 0, false);
  const auto array = [&](int i, bool is_input) { return Array(dtype, tokens * kHeads[i] * cols, offset, is_input); };
  const auto statistic = [&](int i) { return Array(Dtype::f32, tokens * kHeads[i], 0, false); };
  const Array x[] = {array(0, true), array(1, true)}, y[] = {array(0, false), array(1, false)};
  const Array dy[] = {array(0, true), array(1, true)}, dx[] = {array(0, false), array(1, false)};
  const Array mean[] = {statistic(0), statistic(1)}, rstd[] = {statistic(0), statistic(1)};
  const Array scale[] = {{dtype, kHeads[0] * cols, offset, true}, {dtype, cols, offset, true}};
  const Array dscale[] = {{dtype, kHeads[0] * cols, 0, false}, {dtype, cols, 0, false}};
  constexpr int64_t kRows = kHeads[0] + 2 * kHeads[1];  // of a token, where one array has q, k and v
  const Array qkv(dtype, tokens * kRows * cols, offset, true), dqkv(dtype, tokens * kRows * cols, offset, false);
  const Array v_out(dtype, tokens * kHeads[1] * cols, offset, false);
  const auto part = [&](const Array& packed, int64_t head) {
    return static_cast<char*>(packed.get()) + head * cols * size_of(dtype);
  };
  for (const bool interleaved : {false, true}) {
    QkNormRotaryForward f{};
    f.norm = norm, f.tokens = tokens, f.inner = inner, f.cols = cols, f.epsilon = 1e-6f;
    f.rotation.dim = dim, f.rotation.interleaved = interleaved, f.rotation.token_rows.inner = {tokens, 1};
    if (interleaved) f.rotation.cos = floats(cos), f.rotation.sin = floats(sin);
    if (!interleaved) f.rotation.positions = floats(positions), f.rotation.frequencies = floats(frequencies);
    QkNormRotaryBackward b{};
    b.norm = norm, b.tokens = tokens, b.inner = inner, b.cols = cols, b.rotation = f.rotation;
    b.workspace = {floats(workspace), workspace_floats};
    for (const int i : {0, 1}) {
      Heads& heads = i == 0 ? f.q : f.k;
      heads.heads = heads.x_rows = heads.y_rows = kHeads[i];
      heads.x = {x[i].get(), dtype}, heads.y = {y[i].get(), dtype};
      heads.has_scale_per_head = normed && i == 0;
      if (normed) heads.scale = {scale[i].get(), dtype}, heads.rstd = floats(rstd[i]);
      if (layer) heads.mean = floats(mean[i]);
      HeadsGrad& grad = i == 0 ? b.q : b.k;
      grad.heads = grad.x_rows = kHeads[i], grad.dy = {dy[i].get(), dtype}, grad.dx = {dx[i].get(), dtype};
      grad.has_scale_per_head = heads.has_scale_per_head;
      if (!normed) continue;
      grad.x = heads.x, grad.scale = heads.scale, grad.mean = heads.mean, grad.rstd = heads.rstd;
      grad.dscale = {dscale[i].get(), dtype};
    }
    finish(jaxnorm::cuda::run(f, nullptr), "rotary forward");
    finish(jaxnorm::cuda::run(b, nullptr), "rotary backward");
    if (inner > 1) continue;
    for (const int i : {0, 1}) {
      Heads& heads = i == 0 ? f.q : f.k;
      HeadsGrad& grad = i == 0 ? b.q : b.k;
      heads.x_rows = grad.x_rows = kRows;
      heads.x.data = part(qkv, i * kHeads[0]), grad.dx.data = part(dqkv, i * kHeads[0]);
      if (normed) grad.x = heads.x;
    }
    constexpr int64_t kBegin = kHeads[0] + kHeads[1];
    f.v = {kRows, kHeads[1], {part(qkv, kBegin), dtype}, {v_out.get(), dtype}};
    b.v = {kHeads[1], kRows, layer ? Input{} : Input{v_out.get(), dtype}, {part(dqkv, kBegin), dtype}};
    finish(jaxnorm::cuda::run(f, nullptr), "packed rotary forward");
    finish(jaxnorm::cuda::run(b, nullptr), "packed rotary backward");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto asked = [&](int i, const char* value) { return argc <= i || std::strcmp(argv[i], value) == 0; };
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (const Kind kind : {Kind::rms, Kind::layer}) {
      if (!asked(1, kind == Kind::rms ? "rms" : "layer") || !asked(2, dtype == Dtype::f32 ? "f32" : "bf16")) continue;
      if (argc == 5) {
        run(kind, dtype, std::atoll(argv[3]), std::atoll(argv[4]), 0);
        run_quantized(kind, dtype, std::atoll(argv[3]), std::atoll(argv[4]), 0);
        if (kind == Kind::rms) run_softmax(dtype, std::atoll(argv[3]), std::atoll(argv[4]), 0);
        if (kind == Kind::rms) run_softmax_grad(dtype, std::atoll(argv[3]), std::atoll(argv[4]), 0);
        if (kind == Kind::rms) run_gated_activation(dtype, std::atoll(argv[3]), std::atoll(argv[4]), true, 0);
        if (kind == Kind::rms && std::atoll(argv[4]) <= kGatedCols)
          run_gated(dtype, std::atoll(argv[3]), std::atoll(argv[4]), 1, 0);
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
      // ends any program (docs/experiments/sanitizer.md).
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
      for (const int64_t cols : {1, 24, 64, 257, 512, 1024, 4096, 5001, 12288, 30001, 40000, 65536, 262144, 600000})
        for (const int64_t rows : {1, 37}) run_softmax_grad(dtype, rows, cols, 0);
      for (const int64_t cols : {64, 1024, 4096, 65536}) run_softmax_grad(dtype, 37, cols, 1);
      for (const int64_t cols : {24, 64, 100, 128, 256, 512, 1024, 4096, 5120, 8192, 12288, 16384})
        for (const int64_t weight_rows : {1, 8}) run_gated(dtype, 700, cols, weight_rows, 0);
      for (const int64_t cols : {64, 1024, 4096}) run_gated(dtype, 37, cols, 1, 1);
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
