// What a call runs on the CPU: `run` on the threads that it is given, and the kernels of an instruction set.
#pragma once

#include "engine/cpu/parallel.h"
#include "ops/qk_norm_rotary/call.h"

namespace jaxnorm::cpu {

// std::bad_alloc: there is no memory for f32 weights, for rows or for sums over them.
void run(const QkNormRotaryForward& p, const ParallelFor& parallel_for);
void run(const QkNormRotaryBackward& p, const ParallelFor& parallel_for);

// Of all heads of tokens [begin, end); scales, their gradients and `traffic` as those of the norms.
struct QkNormRotaryKernels {
  static const QkNormRotaryKernels baseline, avx2, avx512;

  void (*forward)(const QkNormRotaryForward& p, int64_t begin, int64_t end, int64_t traffic);
  void (*backward)(const QkNormRotaryBackward& p, int64_t begin, int64_t end, float* dq_scale, float* dk_scale,
                   int64_t traffic);
};

}  // namespace jaxnorm::cpu
