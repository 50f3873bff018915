// Rows rounded to 8 bits, and their launch.
#include "engine/cpu/columns.h"
#include "engine/cpu/launch.h"
#include "ops/quantize/call.h"
#include "ops/shared/cpu/quantize.h"

namespace jaxnorm::cpu {

struct QuantizeKernels {
  static const QuantizeKernels baseline, avx2, avx512;

  void (*rows)(const QuantizeForward& p, int64_t begin, int64_t end);
};

namespace {

void quantize_rows(const QuantizeForward& p, int64_t begin, int64_t end) {
  with_type(p.x.dtype, [&](auto type) {
    const InputRows<decltype(type)> x(p.x, p.cols);
    with_quantized_type(p.quantized.values.dtype, [&](auto code) {
      for (int64_t row = begin; row < end; ++row) {
        const auto value = [from = x[row]](int64_t column, auto extent) { return load(from + column, extent); };
        quantize(p.quantized, row, p.cols, 0, value, value, code);
      }
    });
  });
}

}  // namespace

const QuantizeKernels QuantizeKernels::JAXNORM_ISA = {quantize_rows};

#ifdef JAXNORM_ONCE
void run(const QuantizeForward& p, const ParallelFor& parallel_for) {
  expect_writes(p.quantized.values, p.rows * p.cols);
  for_each_rows(parallel_for, p.rows, p.cols,
                [&](int64_t begin, int64_t end) { kernels<QuantizeKernels>().rows(p, begin, end); });
}
#endif

}  // namespace jaxnorm::cpu
