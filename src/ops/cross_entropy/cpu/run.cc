// The launches of cross-entropy with integer labels.
#include "cpu/engine/isa.h"
#include "ops/cross_entropy/cpu.h"

namespace jaxnorm::cpu {

void run(const CrossEntropyForward& p, const ParallelFor& parallel_for) {
  const int64_t traffic = p.rows * p.cols * size_of(p.x.dtype);
  for_each_rows(parallel_for, p.rows, p.cols,
                [&](int64_t begin, int64_t end) { kernels<CrossEntropyKernels>().forward(p, begin, end, traffic); });
}

void run(const CrossEntropyBackward& p, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, traffic = elements * 2 * size_of(p.x.dtype);
  expect_writes(p.dx, elements);
  for_each_rows(parallel_for, p.rows, p.cols,
                [&](int64_t begin, int64_t end) { kernels<CrossEntropyKernels>().backward(p, begin, end, traffic); });
}

}  // namespace jaxnorm::cpu
