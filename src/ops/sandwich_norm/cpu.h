// What a call runs on the CPU: `run` on the threads that it is given, and the kernels of an instruction set.
#pragma once

#include "cpu/engine/parallel.h"
#include "ops/sandwich_norm/call.h"

namespace jaxnorm::cpu {

// std::bad_alloc: there is no memory for f32 weights, for rows or for sums over them.
void run(const SandwichNormForward& p, const ParallelFor& parallel_for);
void run(const SandwichNormBackward& p, const ParallelFor& parallel_for);

// As those of the norms.
struct SandwichNormKernels {
  static const SandwichNormKernels baseline, avx2, avx512;

  void (*forward)(const SandwichNormForward& p, int64_t begin, int64_t end, int64_t traffic);
  void (*backward)(const SandwichNormBackward& p, int64_t begin, int64_t end, float* dpost_scale, float* dscale,
                   float* row, int64_t traffic);
};

}  // namespace jaxnorm::cpu
