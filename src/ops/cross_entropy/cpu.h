// What a call runs on the CPU: `run` on the threads that it is given, and the kernels of an instruction set.
#pragma once

#include "cpu/engine/parallel.h"
#include "ops/cross_entropy/call.h"

namespace jaxnorm::cpu {

// std::bad_alloc: there is no memory for f32 weights, for rows or for sums over them.
void run(const CrossEntropyForward& p, const ParallelFor& parallel_for);
void run(const CrossEntropyBackward& p, const ParallelFor& parallel_for);

// Of rows [begin, end); `traffic` is how many bytes all rows of the call read and write.
struct CrossEntropyKernels {
  static const CrossEntropyKernels baseline, avx2, avx512;

  void (*forward)(const CrossEntropyForward& p, int64_t begin, int64_t end, int64_t traffic);
  void (*backward)(const CrossEntropyBackward& p, int64_t begin, int64_t end, int64_t traffic);
};

}  // namespace jaxnorm::cpu
