// The launches of softmax and log-softmax.
#include "cpu/engine/isa.h"
#include "ops/softmax/cpu.h"

namespace jaxnorm::cpu {

void run(const SoftmaxForward& p, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, traffic = elements * (size_of(p.x.dtype) + size_of(p.y.dtype));
  expect_writes(p.y, elements);
  constexpr int64_t kKept = 1 << 15;  // columns, at most, of which the exponentials are kept
  for_each_rows_with_room(parallel_for, p.rows, p.cols, p.log || p.cols > kKept ? 0 : floats_of_rows(p.cols),
                          [&](int64_t begin, int64_t end, float* kept) {
                            kernels<SoftmaxKernels>().softmax(p, begin, end, kept, traffic);
                          });
}

void run(const SoftmaxBackward& p, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, traffic = elements * (2 * size_of(p.dy.dtype) + size_of(p.dx.dtype));
  expect_writes(p.dx, elements);
  for_each_rows(parallel_for, p.rows, p.cols,
                [&](int64_t begin, int64_t end) { kernels<SoftmaxKernels>().softmax_grad(p, begin, end, traffic); });
}

void run(const LogSoftmaxBackward& p, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, traffic = elements * (size_of(p.dy.dtype) + 2 * size_of(p.x.dtype));
  expect_writes(p.dx, elements);
  for_each_rows(parallel_for, p.rows, p.cols, [&](int64_t begin, int64_t end) {
    kernels<SoftmaxKernels>().log_softmax_grad(p, begin, end, traffic);
  });
}

}  // namespace jaxnorm::cpu
