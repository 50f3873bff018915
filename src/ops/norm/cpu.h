// What a call runs on the CPU: `run` on the threads that it is given, and the kernels of an instruction set.
#pragma once

#include "engine/cpu/parallel.h"
#include "ops/norm/call.h"
#include "ops/norm/gated.h"
#include "ops/norm/quantized.h"

namespace jaxnorm::cpu {

// std::bad_alloc: there is no memory for f32 weights, for rows or for sums over them.
void run(const NormForward& p, const ParallelFor& parallel_for);
void run(const ScaledAddNormForward& p, const ParallelFor& parallel_for);
void run(const ScaledAddQuantizedNormForward& p, const ParallelFor& parallel_for);
void run(const GatedNormForward& p, const ParallelFor& parallel_for);
void run(const NormBackward& p, const ParallelFor& parallel_for);
void run(const GatedNormBackward& p, const ParallelFor& parallel_for);

// In the ops that these are given, scale, bias and smooth are f32 and the scale has its offset in it: F32Weight makes
// them so. They work on rows [begin, end); `traffic` is how many bytes all rows of the call read and write. Gradients
// of weights are added to f32 sums of the weights' shape; null: they are not wanted. `products`, `row` and `kept` are
// room for rows.
struct NormKernels {
  static const NormKernels baseline, avx2, avx512;

  // With an addition, which is then done first, p.x is its sum.
  void (*norm)(const NormForward& p, const Addition* addition, int64_t begin, int64_t end, int64_t traffic);
  void (*quantized_norm)(const QuantizedNormForward& p, const Addition* addition, int64_t begin, int64_t end,
                         int64_t traffic);
  void (*gated_norm)(const GatedNormForward& p, int64_t begin, int64_t end, float* products, int64_t traffic);
  void (*norm_grad)(const NormBackward& p, int64_t begin, int64_t end, float* dscale, float* dbias, int64_t traffic);
  void (*gated_norm_grad)(const GatedNormBackward& p, int64_t begin, int64_t end, float* dscale, float* kept,
                          int64_t traffic);
};

}  // namespace jaxnorm::cpu
