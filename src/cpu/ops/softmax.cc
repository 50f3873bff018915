// The launches of softmax and log-softmax.
#include "cpu/kernels.h"
#include "cpu/ops.h"

namespace jaxnorm::cpu {

void run(const SoftmaxForward& p, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, traffic = elements * (size_of(p.x.dtype) + size_of(p.y.dtype));
  expect_writes(p.y, elements);
  for_each_rows(parallel_for, p.rows, p.cols,
                [&](int64_t begin, int64_t end) { kernels().softmax(p, begin, end, traffic); });
}

void run(const SoftmaxBackward& p, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, traffic = elements * (2 * size_of(p.dy.dtype) + size_of(p.dx.dtype));
  expect_writes(p.dx, elements);
  for_each_rows(parallel_for, p.rows, p.cols,
                [&](int64_t begin, int64_t end) { kernels().softmax_grad(p, begin, end, traffic); });
}

void run(const LogSoftmaxBackward& p, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, traffic = elements * (size_of(p.dy.dtype) + 2 * size_of(p.x.dtype));
  expect_writes(p.dx, elements);
  for_each_rows(parallel_for, p.rows, p.cols,
                [&](int64_t begin, int64_t end) { kernels().log_softmax_grad(p, begin, end, traffic); });
}

}  // namespace jaxnorm::cpu
