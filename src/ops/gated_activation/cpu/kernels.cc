// Gated activations, by parts of rows, and their launches.
#include "engine/cpu/columns.h"
#include "engine/cpu/launch.h"
#include "engine/cpu/vector.h"
#include "ops/gated_activation/call.h"
#include "ops/shared/cpu/functions.h"
#include "ops/shared/cpu/quantize.h"

namespace jaxnorm::cpu {

// A row is divided into so many parts of as many columns, of which the last may have fewer.
struct RowParts {
  int64_t count, cols;
};

// Of parts [begin, end) of all rows; `traffic` is how many bytes all of the call reads and writes.
struct GatedActivationKernels {
  static const GatedActivationKernels baseline, avx2, avx512;

  void (*forward)(const GatedActivationForward& p, RowParts parts, int64_t begin, int64_t end, int64_t traffic);
  // Of rows [begin, end), with room for one of float32.
  void (*quantized)(const GatedActivationQuantizedForward& p, int64_t begin, int64_t end, float* y);
  void (*backward)(const GatedActivationBackward& p, RowParts parts, int64_t begin, int64_t end, int64_t traffic);
};

namespace {

// Calls f(row, column, extent) for each vector of parts [begin, end).
template <class F>
[[gnu::always_inline]] inline void for_each_vector_of(const GatedShape& shape, RowParts parts, int64_t begin,
                                                      int64_t end, F f) {
  int64_t row = begin / parts.count, column = begin % parts.count * parts.cols;
  for (int64_t part = begin; part < end; ++part) {
    const int64_t left = shape.cols - column;
    for_each_vector(left < parts.cols ? left : parts.cols, [&](int64_t i, auto extent) { f(row, column + i, extent); });
    column += parts.cols;
    if (column >= shape.cols) ++row, column = 0;
  }
  fence();
}

// Calls f(X{}, A{}) with the types that stand for the dtype and the activation of a call.
template <class F>
void with_call(Dtype dtype, Activation activation, F f) {
  with_type(dtype,
            [&](auto x) { with_one_of<Silu, Sigmoid, Relu2, Gelu, GeluExact>(activation, [&](auto a) { f(x, a); }); });
}

void forward(const GatedActivationForward& p, RowParts parts, int64_t begin, int64_t end, int64_t traffic) {
  with_call(p.y.dtype, p.activation, [&](auto type, auto a) {
    using X = decltype(type);
    using A = decltype(a);
    const InputRows<X> gate(p.gate, p.stride), up(p.up, p.stride);
    const OutputRows<X> y(p.y, p.cols, traffic);
    for_each_vector_of(p, parts, begin, end, [=](int64_t row, int64_t column, auto extent) {
      y[row](column, A::of(load(gate[row] + column, extent)) * load(up[row] + column, extent), extent);
    });
  });
}

// y of a row, in f32.
void compute(const GatedActivationQuantizedForward& p, int64_t row, float* y) {
  with_call(p.gate.dtype, p.activation, [&](auto type, auto a) {
    using X = decltype(type);
    using A = decltype(a);
    const X *const gate = InputRows<X>(p.gate, p.stride)[row], *const up = InputRows<X>(p.up, p.stride)[row];
    for_each_vector(p.cols, [=](int64_t column, auto extent) {
      store(y + column, A::of(load(gate + column, extent)) * load(up + column, extent), extent);
    });
  });
}

void quantized(const GatedActivationQuantizedForward& p, int64_t begin, int64_t end, float* y) {
  const auto value = [y](int64_t column, auto extent) { return load(y + column, extent); };
  for (int64_t row = begin; row < end; ++row) {
    compute(p, row, y);
    with_quantized_type(p.quantized.values.dtype, [&](auto code) {
      for (int64_t first = 0; first < p.cols; first += p.quantized.group)
        quantize(p.quantized, row, p.cols, first, value, value, code);
    });
  }
}

void backward(const GatedActivationBackward& p, RowParts parts, int64_t begin, int64_t end, int64_t traffic) {
  with_call(p.dy.dtype, p.activation, [&](auto type, auto a) {
    using X = decltype(type);
    using A = decltype(a);
    const InputRows<X> dy(p.dy, p.cols), gate(p.gate, p.stride), up(p.up, p.stride);
    const OutputRows<X> dgate(p.dgate, p.stride, traffic), dup(p.dup, p.stride, traffic);
    for_each_vector_of(p, parts, begin, end, [=](int64_t row, int64_t column, auto extent) {
      const Vec d = load(dy[row] + column, extent), v = load(gate[row] + column, extent);
      const Activated activated = A::with_slope(v);
      if (const auto to = dgate[row])
        to(column, A::through(d * load(up[row] + column, extent) * activated.slope, v), extent);
      if (const auto to = dup[row]) to(column, d * activated.value, extent);
    });
  });
}

}  // namespace

const GatedActivationKernels GatedActivationKernels::JAXNORM_ISA = {cpu::forward, cpu::quantized, cpu::backward};

#ifdef JAXNORM_ONCE
namespace {

// Calls task(parts, begin, end) for parts of rows: a row may be as long as all of an array.
template <class Task>
void for_each_parts(const ParallelFor& parallel_for, const GatedShape& shape, Task task) {
  if (shape.rows * shape.cols == 0) return;
  const RowParts parts{ceil_div(shape.cols, kTaskElements), std::min(shape.cols, kTaskElements)};
  for_each_block(parallel_for, shape.rows * parts.count, std::max<int64_t>(1, kTaskElements / parts.cols),
                 [&](int64_t begin, int64_t end) { task(parts, begin, end); });
}

}  // namespace

void run(const GatedActivationForward& p, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, traffic = 3 * elements * size_of(p.y.dtype);
  expect_writes(p.y, elements);
  for_each_parts(parallel_for, p, [&](RowParts parts, int64_t begin, int64_t end) {
    kernels<GatedActivationKernels>().forward(p, parts, begin, end, traffic);
  });
}

void run(const GatedActivationQuantizedForward& p, const ParallelFor& parallel_for) {
  expect_writes(p.quantized.values, p.rows * p.cols);
  for_each_rows_with_room(parallel_for, p.rows, p.cols, p.cols, [&](int64_t begin, int64_t end, float* y) {
    kernels<GatedActivationKernels>().quantized(p, begin, end, y);
  });
}

void run(const GatedActivationBackward& p, const ParallelFor& parallel_for) {
  const int64_t traffic = 5 * p.rows * p.cols * size_of(p.dy.dtype);
  expect_writes(p.dgate, p.rows * p.stride);
  if (p.stride == p.cols) expect_writes(p.dup, p.rows * p.cols);
  for_each_parts(parallel_for, p, [&](RowParts parts, int64_t begin, int64_t end) {
    kernels<GatedActivationKernels>().backward(p, parts, begin, end, traffic);
  });
}
#endif

}  // namespace jaxnorm::cpu
