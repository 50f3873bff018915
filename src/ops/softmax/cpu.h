// What a call runs on the CPU: `run` on the threads that it is given, and the kernels of an instruction set.
#pragma once

#include "cpu/engine/parallel.h"
#include "ops/softmax/call.h"

namespace jaxnorm::cpu {

// std::bad_alloc: there is no memory for f32 weights, for rows or for sums over them.
void run(const SoftmaxForward& p, const ParallelFor& parallel_for);
void run(const SoftmaxBackward& p, const ParallelFor& parallel_for);
void run(const LogSoftmaxBackward& p, const ParallelFor& parallel_for);

// Of rows [begin, end); `traffic` is how many bytes all rows of the call read and write, `kept` room for rows.
struct SoftmaxKernels {
  static const SoftmaxKernels baseline, avx2, avx512;

  void (*softmax)(const SoftmaxForward& p, int64_t begin, int64_t end, float* kept, int64_t traffic);
  void (*softmax_grad)(const SoftmaxBackward& p, int64_t begin, int64_t end, int64_t traffic);
  void (*log_softmax_grad)(const LogSoftmaxBackward& p, int64_t begin, int64_t end, int64_t traffic);
};

}  // namespace jaxnorm::cpu
