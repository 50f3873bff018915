// The launches of the sandwich norm.
#include "cpu/engine/f32_weight.h"
#include "cpu/engine/grad_tasks.h"
#include "cpu/engine/isa.h"
#include "ops/sandwich_norm/cpu.h"

namespace jaxnorm::cpu {

void run(const SandwichNormForward& call, const ParallelFor& parallel_for) {
  SandwichNormForward p = call;
  const F32Weight post_scale(&p.post_scale, p.scale_offset, p.cols, parallel_for);
  const F32Weight scale(&p.scale, p.scale_offset, p.cols, parallel_for);
  const int64_t elements = p.rows * p.cols, traffic = elements * 2 * (size_of(p.x.dtype) + size_of(p.sum.dtype));
  expect_writes(p.y, elements);
  expect_writes(p.sum, elements);
  for_each_rows(parallel_for, p.rows, p.cols,
                [&](int64_t begin, int64_t end) { kernels<SandwichNormKernels>().forward(p, begin, end, traffic); });
}

void run(const SandwichNormBackward& call, const ParallelFor& parallel_for) {
  SandwichNormBackward p = call;
  const F32Weight post_scale(&p.post_scale, p.scale_offset, p.cols, parallel_for);
  const F32Weight scale(&p.scale, p.scale_offset, p.cols, parallel_for);
  const int64_t elements = p.rows * p.cols, traffic = elements * 3 * (size_of(p.x.dtype) + size_of(p.sum.dtype));
  expect_writes(p.dx, elements);
  expect_writes(p.daddend, elements);
  const bool keeps_row = p.goes_on() && !p.daddend;
  for_each_grad_rows(parallel_for, sum_grad_of(p, p.daddend), p.dpost_scale, p.dscale, keeps_row ? p.cols : 0,
                     [&](int64_t begin, int64_t end, float* dpost_scale, float* dscale, float* row) {
                       kernels<SandwichNormKernels>().backward(p, begin, end, dpost_scale, dscale, row, traffic);
                     });
}

}  // namespace jaxnorm::cpu
