// The launches of the gated norm.
#include "cpu/engine/f32_weight.h"
#include "cpu/engine/grad_tasks.h"
#include "cpu/ops.h"

namespace jaxnorm::cpu {

void run(const GatedNormForward& call, const ParallelFor& parallel_for) {
  GatedNormForward p = call;
  const F32Weight scale(&p.scale, p.scale_offset, p.weight_rows.count * p.cols, parallel_for);
  const int64_t elements = p.rows * p.cols, traffic = elements * 3 * size_of(p.x.dtype);
  expect_writes(p.y, elements);
  for_each_rows_with_room(
      parallel_for, p.rows, p.cols, floats_of_rows(p.cols),
      [&](int64_t begin, int64_t end, float* products) { kernels().gated_norm(p, begin, end, products, traffic); });
}

void run(const GatedNormBackward& call, const ParallelFor& parallel_for) {
  GatedNormBackward p = call;
  const F32Weight scale(&p.scale, p.scale_offset, p.weight_rows.count * p.cols, parallel_for);
  const int64_t elements = p.rows * p.cols, traffic = elements * 5 * size_of(p.x.dtype);
  expect_writes(p.dx, elements);
  expect_writes(p.dgate, elements);
  for_each_grad_rows(parallel_for, p, p.dscale, {}, 2 * p.cols,
                     [&](int64_t begin, int64_t end, float* dscale, float*, float* kept) {
                       kernels().gated_norm_grad(p, begin, end, dscale, kept, traffic);
                     });
}

}  // namespace jaxnorm::cpu
