// The launch of the gated norm with a quantised result.
#include "cpu/engine/f32_weight.h"
#include "cpu/ops.h"

namespace jaxnorm::cpu {

void run(const GatedNormQuantizedForward& call, const ParallelFor& parallel_for) {
  GatedNormQuantizedForward p = call;
  const int64_t elements = p.rows * p.cols, weights = p.weight_rows.count * p.cols;
  const F32Weight scale(&p.scale, p.scale_offset, weights, parallel_for);
  const F32Weight smooth(&p.quantized.smooth, 0, weights, parallel_for);
  const int64_t traffic = elements * (2 * size_of(p.x.dtype) + size_of(p.quantized.values.dtype));
  expect_writes(p.quantized.values, elements);
  const int64_t products = floats_of_rows(p.cols);
  for_each_rows_with_room(parallel_for, p.rows, p.cols, products + p.cols,
                          [&](int64_t begin, int64_t end, float* room) {
                            kernels().gated_norm_quantized(p, begin, end, room, room + products, traffic);
                          });
}

}  // namespace jaxnorm::cpu
