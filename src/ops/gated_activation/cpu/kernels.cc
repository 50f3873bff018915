// Gated activations, by parts of rows.
#include "cpu/engine/columns.h"
#include "cpu/engine/memory.h"
#include "cpu/engine/types.h"
#include "ops/gated_activation/cpu.h"
#include "ops/shared/cpu/activation.h"
#include "ops/shared/cpu/quantize.h"

namespace jaxnorm::cpu {
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

}  // namespace jaxnorm::cpu
