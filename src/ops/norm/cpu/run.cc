// The launches of the norms, plain, after an addition, gated and quantised.
#include "engine/cpu/f32_weight.h"
#include "engine/cpu/grad_tasks.h"
#include "engine/cpu/isa.h"
#include "ops/norm/cpu.h"

namespace jaxnorm::cpu {
namespace {

// Calls task(begin, end) for all rows of a forward `p` whose weights `p` has as the kernels want them meanwhile.
template <class Task>
void for_each_forward_rows(NormOperands& p, const ParallelFor& parallel_for, Task task) {
  const int64_t weights = p.weight_rows.count * p.cols;
  const F32Weight scale(&p.scale, p.scale_offset, weights, parallel_for), bias(&p.bias, 0, weights, parallel_for);
  for_each_rows(parallel_for, p.rows, p.cols, task);
}

void forward(NormForward p, const Addition* addition, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, x_size = size_of(p.x.dtype);
  const int64_t traffic =
      elements * (size_of(p.y.dtype) + (addition ? size_of(addition->a.dtype) + 2 * x_size : x_size));
  expect_writes(p.y, p.rows * p.y_stride);
  if (addition) expect_writes(addition->sum, elements);
  for_each_forward_rows(p, parallel_for, [&](int64_t begin, int64_t end) {
    kernels<NormKernels>().norm(p, addition, begin, end, traffic);
  });
}

}  // namespace

void run(const NormForward& p, const ParallelFor& parallel_for) { forward(p, nullptr, parallel_for); }

void run(const ScaledAddNormForward& call, const ParallelFor& parallel_for) {
  if (!call.addend) return run(static_cast<const NormForward&>(call), parallel_for);
  const ScaledAddNormForward p = with_sum_somewhere(call);
  Addition addition = addition_of(p);
  const F32Weight factor(&addition.factor, -0.0f, p.weight_rows.count * p.cols, parallel_for);
  forward(of_sum<AddNormForward>(p), &addition, parallel_for);
}

void run(const ScaledAddQuantizedNormForward& call, const ParallelFor& parallel_for) {
  ScaledAddQuantizedNormForward p = call;
  Addition addition = addition_of(p);
  const F32Weight factor(&addition.factor, -0.0f, p.branch_rows.count * p.cols, parallel_for);
  const int64_t elements = p.rows * p.cols, sum_size = p.sum ? size_of(p.sum.dtype) : 0;
  const int64_t y_size = p.y ? size_of(p.y.dtype) : 0;
  const int64_t traffic = elements * (size_of(p.x.dtype) + 2 * sum_size + size_of(p.quantized.values.dtype) + y_size);
  if (p.sum) p.x = {p.sum.data, p.sum.dtype};
  const F32Weight smooth(&p.quantized.smooth, 0, p.cols, parallel_for);
  expect_writes(p.quantized.values, elements);
  expect_writes(p.y, elements);
  expect_writes(p.sum, elements);
  for_each_forward_rows(p, parallel_for, [&](int64_t begin, int64_t end) {
    kernels<NormKernels>().quantized_norm(p, p.sum ? &addition : nullptr, begin, end, traffic);
  });
}

void run(const NormBackward& call, const ParallelFor& parallel_for) {
  NormBackward p = call;
  const F32Weight scale(&p.scale, p.scale_offset, p.weight_rows.count * p.cols, parallel_for);
  const int64_t elements = p.rows * p.cols, x_arrays = p.dsum ? 3 : 2;
  const int64_t traffic = elements * (x_arrays * size_of(p.x.dtype) + size_of(p.dy.dtype));
  expect_writes(p.dx, elements);
  for_each_grad_rows(parallel_for, p, p.dscale, p.dbias, 0,
                     [&](int64_t begin, int64_t end, float* dscale, float* dbias, float*) {
                       kernels<NormKernels>().norm_grad(p, begin, end, dscale, dbias, traffic);
                     });
}

void run(const GatedNormForward& call, const ParallelFor& parallel_for) {
  GatedNormForward p = call;
  const F32Weight scale(&p.scale, p.scale_offset, p.weight_rows.count * p.cols, parallel_for);
  const int64_t elements = p.rows * p.cols, traffic = elements * 3 * size_of(p.x.dtype);
  expect_writes(p.y, elements);
  for_each_rows_with_room(parallel_for, p.rows, p.cols, floats_of_rows(p.cols),
                          [&](int64_t begin, int64_t end, float* products) {
                            kernels<NormKernels>().gated_norm(p, begin, end, products, traffic);
                          });
}

void run(const GatedNormBackward& call, const ParallelFor& parallel_for) {
  GatedNormBackward p = call;
  const F32Weight scale(&p.scale, p.scale_offset, p.weight_rows.count * p.cols, parallel_for);
  const int64_t elements = p.rows * p.cols, traffic = elements * 5 * size_of(p.x.dtype);
  expect_writes(p.dx, elements);
  expect_writes(p.dgate, elements);
  for_each_grad_rows(parallel_for, p, p.dscale, {}, 2 * p.cols,
                     [&](int64_t begin, int64_t end, float* dscale, float*, float* kept) {
                       kernels<NormKernels>().gated_norm_grad(p, begin, end, dscale, kept, traffic);
                     });
}

}  // namespace jaxnorm::cpu
