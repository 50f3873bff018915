// The CPU kernels without Python, for AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer. Each
// instruction set is compiled as cmake/cpu.cmake does it, but for the optimisation:
//
//   mkdir -p build/sanitize
//   flags="-std=c++17 -O1 -g -Isrc -ffp-contract=off -fno-math-errno -fsanitize=address,undefined
//     -fno-sanitize-recover=all"                                                          # or -fsanitize=thread
//   for isa in "baseline -DJAXNORM_ONCE" "avx2 -mavx2 -mfma -mf16c"
//     "avx512 -mavx512f -mavx512vl -mavx512bw -mavx512dq -mfma -mf16c"; do                # on one line
//     set -- $isa; g++ $flags "${@:2}" -DJAXNORM_ISA=$1 -r src/cpu/engine/arrays.cc
//       src/ops/*/cpu/[!r]*.cc -o build/sanitize/$1.o; done                                # on one line
//   g++ $flags tests/sanitize_cpu.cc src/ops/*/cpu/run.cc build/sanitize/*.o -pthread -o build/sanitize/cpu
//   build/sanitize/cpu                  # every instruction set that this processor runs
//   build/sanitize/cpu avx2             # one of them
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <thread>

#include "cpu/engine/isa.h"
#include "ops/cross_entropy/call.h"
#include "ops/gated_activation/call.h"
#include "ops/group_norm/cpu.h"
#include "ops/norm/cpu.h"
#include "ops/qk_norm_rotary/cpu.h"
#include "ops/softmax/call.h"
#include "sanitize.h"

namespace jaxnorm::cpu {

Isa chosen = Isa::baseline;

// In place of that of src/cpu/engine/isa.cc.
Isa isa() { return chosen; }

}  // namespace jaxnorm::cpu

namespace {

using namespace jaxnorm;
using namespace jaxnorm::sanitize;

// Two threads draw tasks.
void parallel_for(int64_t count, const std::function<void(int64_t)>& task) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i; (i = next++) < count;) task(i);
  };
  std::thread other(work);
  work();
  other.join();
}

}  // namespace

namespace jaxnorm::sanitize {

// It ends with its last element.
Array::Array(Dtype dtype, int64_t elements, int64_t offset, bool is_input)
    : dtype_(dtype), offset_(offset * size_of(dtype)), data_(new char[elements * size_of(dtype) + offset_]) {
  if (!is_input) return;
  for (int64_t i = 0; i < elements; ++i) {
    const float value = std::sin(0.7f * static_cast<float>(i)) + 0.3f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    // To f16 some small numbers: 5 bits of exponent from 8.
    const auto half =
        static_cast<uint16_t>(dtype == Dtype::bf16 ? bits >> 16 : (bits >> 16 & 0x8000) | 0x3c00 | i % 1024);
    char* const to = data_ + offset_ + i * size_of(dtype);
    if (dtype == Dtype::f32) {
      std::memcpy(to, &bits, 4);
    } else {
      std::memcpy(to, &half, 2);
    }
  }
}

Array::~Array() { delete[] data_; }

template <class Op>
void call(const Op& op, const char*) {
  cpu::run(op, parallel_for);
}

int64_t offset_of_gradients(int64_t offset) { return offset; }

}  // namespace jaxnorm::sanitize

namespace {

// Quantised results, with a scale for each row, for groups and given; without an addend and with one.
void run_quantized(Kind kind, Dtype dtype, Dtype format, const Shape& s) {
  const int64_t rows = s.rows, cols = s.cols, size = rows * cols;
  const Array x(dtype, size, s.offset), scale(dtype, cols, s.offset), bias(dtype, cols, s.offset);
  const Array sum(dtype, size, s.offset), smooth(Dtype::bf16, cols, s.offset), given(Dtype::f32, 1, 0);
  const Array mean(Dtype::f32, rows, 0, false), rstd(Dtype::f32, rows, 0, false);
  for (const bool adds : {false, true})
    for (const int64_t group : {int64_t{0}, int64_t{64}, int64_t{128}, cols}) {
      if (group && cols % group) continue;
      const Array values(format, size, s.offset, false), scales(Dtype::f32, group ? size / group : 1, 0, false);
      ScaledAddQuantizedNormForward f{};
      f.kind = kind, f.rows = rows, f.cols = cols, f.epsilon = 1e-6f, f.x = x, f.scale = scale;
      if (kind == Kind::layer) f.bias = bias, f.mean = mean.floats();
      f.rstd = rstd.floats();
      if (adds) f.addend = sum, f.sum = sum;
      f.quantized.values = values, f.quantized.group = group ? group : cols;
      if (adds) f.quantized.smooth = smooth;
      f.quantized.max_scale = std::numeric_limits<float>::infinity(), f.quantized.power_of_two = format != Dtype::s8;
      if (group) {
        f.quantized.scales = scales.floats();
      } else {
        f.quantized.given = given.floats();
      }
      cpu::run(f, parallel_for);
    }
}

struct GroupShape {
  int64_t examples, positions, groups, group_size;
  int64_t offset = 0;
  bool weights_differ = false;  // from example to example
};

// All gradients, that of x alone, and those of the weights alone.
void run_group_norm(Activation activation, Dtype x_dtype, Dtype y_dtype, Dtype weight, const GroupShape& s) {
  const Groups groups{s.examples, s.positions, s.groups, s.group_size};
  const int64_t channels = groups.channels(), size = s.examples * s.positions * channels;
  const int64_t weights = (s.weights_differ ? s.examples : 1) * channels, statistics = s.examples * s.groups;
  const Array x(x_dtype, size, s.offset), scale(weight, weights, s.offset), bias(weight, channels, s.offset);
  const Array y(y_dtype, size, s.offset, false), mean(Dtype::f32, statistics, 0, false);
  const Array rstd(Dtype::f32, statistics, 0, false);
  GroupNormForward f{};
  static_cast<Groups&>(f) = groups;
  f.x = x, f.y = y, f.mean = mean.floats(), f.rstd = rstd.floats(), f.epsilon = 1e-6f, f.activation = activation;
  static_cast<Input&>(f.scale) = scale;
  f.scale_offset = s.offset ? 1.f : 0.f;
  static_cast<Input&>(f.bias) = bias;
  if (s.weights_differ) f.scale.map.axes = 1, f.scale.map.extent[0] = s.examples, f.scale.map.stride[0] = 1;
  cpu::run(f, parallel_for);

  const Array dy(y_dtype, size, s.offset), dx(x_dtype, size, s.offset, false);
  const Array dscale(weight, weights, s.offset, false), dbias(weight, channels, s.offset, false);
  GroupNormBackward b{};
  static_cast<Groups&>(b) = groups;
  b.dy = dy, b.x = x, b.scale = f.scale, b.bias = f.bias, b.mean = f.mean, b.rstd = f.rstd;
  b.scale_offset = f.scale_offset, b.activation = activation;
  for (const int wanted : {1, 2, 3}) {
    b.dx = wanted & 1 ? Output(dx) : Output{};
    b.dscale = wanted & 2 ? Output(dscale) : Output{}, b.dbias = wanted & 2 ? Output(dbias) : Output{};
    cpu::run(b, parallel_for);
  }
  f.mean = f.rstd = nullptr, f.scale = f.bias = {};
  cpu::run(f, parallel_for);
}

void run_group_norms(Dtype dtype) {
  // A thread for each example or for several; a task for each tile; rows of one position and of several, and a rest.
  for (const GroupShape& shape :
       {GroupShape{3, 1, 1, 1}, GroupShape{300, 1, 4, 20, 1, true}, GroupShape{2, 81, 3, 1, 1}, GroupShape{2, 81, 1, 3},
        GroupShape{300, 4, 4, 8, 1}, GroupShape{5, 9, 3, 8, 1, true}, GroupShape{3, 2, 17, 241},
        GroupShape{20, 65, 32, 20, 1}, GroupShape{3, 1000, 4, 24, 0, true}, GroupShape{25, 200, 8, 40, 1, true}})
    for (const auto activation : {Activation::none, Activation::silu, Activation::relu, Activation::gelu})
      run_group_norm(activation, dtype, dtype, shape.offset ? dtype : Dtype::f32, shape);
  for (const Dtype y : {Dtype::f32, Dtype::f16, Dtype::bf16})
    if (is_supported(dtype, y)) run_group_norm(Activation::gelu, dtype, y, y, {2, 30, 2, 7, 1});
}

// Of one array that has gate and up, and of two; both gradients, or of two arrays each alone; and quantised.
void run_gated_activation(Activation activation, Dtype dtype, int64_t rows, int64_t cols, int64_t offset) {
  const int64_t size = rows * cols;
  const Array both(dtype, 2 * size, offset), d_both(dtype, 2 * size, offset, false);
  const Array gate(dtype, size, offset), up(dtype, size, offset), dy(dtype, size, offset);
  const Array y(dtype, size, offset, false), dgate(dtype, size, offset, false), dup(dtype, size, offset, false);
  const auto behind = [&](const Array& array) { return static_cast<char*>(array.get()) + cols * size_of(dtype); };
  const GatedShape packed{rows, cols, 2 * cols}, apart{1, size, size};
  cpu::run(GatedActivationForward{packed, both, {behind(both), dtype}, y, activation}, parallel_for);
  cpu::run(GatedActivationForward{apart, gate, up, y, activation}, parallel_for);
  cpu::run(
      GatedActivationBackward{packed, dy, both, {behind(both), dtype}, d_both, {behind(d_both), dtype}, activation},
      parallel_for);
  for (const int wanted : {1, 2, 3})
    cpu::run(GatedActivationBackward{apart, dy, gate, up, wanted & 1 ? Output(dgate) : Output{},
                                     wanted & 2 ? Output(dup) : Output{}, activation},
             parallel_for);
  for (const int64_t group : {cols, int64_t{32}}) {
    if (cols % group != 0) continue;
    for (const Dtype to : {Dtype::f8e4m3fn, Dtype::f8e5m2, Dtype::s8}) {
      const Array values(to, size, offset, false), scales(Dtype::f32, size / group, 0, false);
      GatedActivationQuantizedForward q{packed, both, {behind(both), dtype}, {}, activation};
      q.quantized.values = values, q.quantized.scales = scales.floats();
      q.quantized.group = group, q.quantized.max_scale = INFINITY;
      cpu::run(q, parallel_for);
    }
  }
}

void run_gated_activations(Dtype dtype) {
  for (const auto activation :
       {Activation::silu, Activation::sigmoid, Activation::relu2, Activation::gelu, Activation::gelu_exact})
    for (const int64_t cols : {1, 15, 16, 31, 64, 257, 40'001})
      for (const int64_t offset : {0, 1}) run_gated_activation(activation, dtype, 7, cols, offset);
}

// Integers of their own allocation: value(i) for each i.
template <class T, class Value>
std::unique_ptr<T[]> integers(int64_t count, Value value) {
  std::unique_ptr<T[]> data(new T[count]);
  for (int64_t i = 0; i < count; ++i) data[i] = static_cast<T>(value(i));
  return data;
}

// Masks of the kinds that there are, each for every row, and where for two rows in turn.
template <class Run>
void with_masks(const Shape& s, bool with_lengths, Run run) {
  const auto where = integers<uint8_t>(2 * s.cols, [](int64_t i) { return i % 3 != 0; });
  const auto lengths = integers<int32_t>(s.rows, [&](int64_t row) { return row * 7 % (s.cols + 3) - 1; });
  const auto starts = integers<int32_t>(s.rows, [&](int64_t row) { return row * 5 % (s.cols + 2) - 1; });
  for (const int kind : {0, 1, 2, 3, 6, 7}) {
    Mask mask;
    if (kind & 1) mask.where = where.get(), mask.where_rows.inner.count = 2;
    if (kind & 2) mask.lengths = lengths.get(), mask.lengths_rows.inner.count = s.rows;
    if (kind & 4) mask.starts = starts.get(), mask.starts_rows.inner.count = s.rows;
    if (with_lengths || !mask.lengths) run(mask);
  }
}

void run_softmax(Dtype x_dtype, Dtype y_dtype, const Shape& s) {
  const int64_t rows = s.rows, cols = s.cols, size = rows * cols;
  const Array x(x_dtype, size, s.offset), dy(y_dtype, size, s.offset), y(y_dtype, size, s.offset, false);
  const Array dx(x_dtype, size, s.offset, false), log_sum(Dtype::f32, rows, 0, false);
  const Array top(Dtype::f32, rows, 0, false);
  with_masks(s, true, [&](const Mask& mask) {
    SoftmaxForward f{rows, cols, x, mask, y, nullptr, nullptr, 0.7f, false};
    cpu::run(f, parallel_for);
    cpu::run(SoftmaxBackward{rows, cols, dy, y, mask, dx, 0.7f}, parallel_for);
    f.log = true, f.log_sum = log_sum.floats(), f.top = top.floats();
    cpu::run(f, parallel_for);
    cpu::run(LogSoftmaxBackward{rows, cols, dy, x, mask, f.log_sum, f.top, dx, 0.7f}, parallel_for);
  });
}

// The gradient in an array of its own, and then in x's place.
void run_cross_entropy(Dtype dtype, float soft_cap, const Shape& s) {
  const int64_t rows = s.rows, cols = s.cols, size = rows * cols;
  const auto labels = integers<int32_t>(rows, [&](int64_t row) { return row * 5 % (cols + 2) - 1; });
  const Array dx(dtype, size, s.offset, false), cotangent(Dtype::f32, rows, 0);
  const Array log_sum(Dtype::f32, rows, 0, false), label(Dtype::f32, rows, 0, false);
  const Array total(Dtype::f32, rows, 0, false), top(Dtype::f32, rows, 0, false);
  with_masks(s, false, [&](const Mask& mask) {
    const Array x(dtype, size, s.offset);
    CrossEntropyForward f{};
    static_cast<Logits&>(f) = {rows, cols, x, labels.get(), mask, 0.7f, soft_cap};
    f.log_sum = log_sum.floats(), f.label_logit = label.floats(), f.top = top.floats();
    cpu::run(f, parallel_for);
    f.total = total.floats();
    cpu::run(f, parallel_for);
    CrossEntropyBackward b{};
    static_cast<Logits&>(b) = f;
    b.log_sum = f.log_sum, b.dlog_sum = cotangent.floats(), b.top = f.top, b.dx = dx;
    cpu::run(b, parallel_for);
    b.dlabel_logit = b.dtotal = cotangent.floats(), b.dx = x;
    cpu::run(b, parallel_for);
  });
}

constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::f16, Dtype::bf16};

void run_all(Kind kind, Dtype dtype) {
  // Less than a vector, whole vectors and a rest, long; less than a task's rows, and several tasks.
  for (const int64_t cols : {1, 3, 15, 16, 24, 31, 64, 100, 257, 1021, 1024, 4097, 40'001})
    for (const int64_t rows : {1, 2, 3, 7, 67})
      for (const int64_t offset : {0, 1}) {
        const Shape shape{rows, cols, offset};
        if (rows * cols > 400'000) continue;
        run_norm(kind, dtype, dtype, rows % 2 ? dtype : Dtype::f32, shape, offset == 0);
        for (const Dtype format : {Dtype::f8e4m3fn, Dtype::f8e5m2, Dtype::s8})
          run_quantized(kind, dtype, format, shape);
        if (kind == Kind::layer || cols > kGatedCols) continue;
        for (const bool first : {false, true}) run_gated(dtype, first, shape);
      }
  for (const Dtype y : kDtypes)
    for (const Dtype weight : kDtypes)
      if (is_supported(dtype, y)) run_norm(kind, dtype, y, weight, {5, 101, 1}, false);
  for (const int64_t cols : {64, 257, 1024}) {
    for (const RowMap map : {RowMap{3, 1}, RowMap{3, 5}, RowMap{40, 3}})
      run_norm(kind, dtype, dtype, dtype, {600, cols, 0, map});
    run_norm(kind, dtype, dtype, dtype, {600, cols, 0, {}, 64});
    run_norm(kind, dtype, dtype, dtype, {37, cols, 1, {}, 1}, false);
    if (kind == Kind::rms) run_gated(dtype, cols == 64, {600, cols, 0, {8, 1}});
  }
  run_quantized(kind, dtype, Dtype::f8e4m3fn, {600, 384, 1});
}

void run_all_softmaxes(Dtype dtype) {
  // As above, and rows of which the exponentials are not kept.
  for (const int64_t cols : {1, 3, 15, 16, 31, 64, 100, 257, 512, 513, 4097, 40'001})
    for (const int64_t rows : {1, 3, 7, 67})
      for (const int64_t offset : {0, 1}) {
        const Shape shape{rows, cols, offset};
        if (rows * cols > 400'000) continue;
        run_softmax(dtype, dtype, shape);
        for (const float soft_cap : {0.f, 30.f, 60.f}) run_cross_entropy(dtype, soft_cap, shape);
      }
  for (const Dtype y : kDtypes)
    if (is_supported(dtype, y)) run_softmax(dtype, y, {5, 101, 1});
}

}  // namespace

int main(int argc, char** argv) {
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  const char* const names[] = {"baseline", "avx2", "avx512"};
  for (const cpu::Isa isa : {cpu::Isa::baseline, cpu::Isa::avx2, cpu::Isa::avx512}) {
    if (isa == cpu::Isa::avx2 ? !has_avx2 : isa == cpu::Isa::avx512 && !has_avx512) continue;
    const char* const name = names[static_cast<int>(isa)];
    if (argc > 1 && std::strcmp(argv[1], name)) continue;
    cpu::chosen = isa;
    for (const Dtype dtype : kDtypes) {
      for (const Kind kind : {Kind::rms, Kind::layer}) run_all(kind, dtype);
      for (const HeadNorm norm : {HeadNorm::none, HeadNorm::rms, HeadNorm::layer})
        for (const int64_t cols : {2, 15, 24, 64, 101, 128, 512})
          for (const int64_t dim : {cols / 2 * 2, (cols + 6) / 8 * 2})
            for (const int64_t inner : {1, 7})
              run_rotary(norm, dtype, {21, inner, 5, inner > 1 ? 1 : 2, cols, dim, 7, cols % 3});
      run_all_softmaxes(dtype);
      run_group_norms(dtype);
      run_gated_activations(dtype);
    }
    std::printf("ran the %s kernels\n", name);
  }
}
