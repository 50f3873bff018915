// What the shim calls: each op, on the threads that it is given.
#pragma once

#include "cpu/engine/parallel.h"
#include "ops/add_norm.h"
#include "ops/cross_entropy.h"
#include "ops/gated_norm.h"
#include "ops/gated_norm_quantized.h"
#include "ops/group_norm.h"
#include "ops/norm.h"
#include "ops/qk_norm_rotary.h"
#include "ops/quantized_norm.h"
#include "ops/sandwich_norm.h"
#include "ops/softmax.h"

namespace jaxnorm::cpu {

// std::bad_alloc: there is no memory for f32 weights or for sums over rows.
void run(const NormForward& p, const ParallelFor& parallel_for);
void run(const AddNormForward& p, const ParallelFor& parallel_for);
void run(const QuantizedNormForward& p, const ParallelFor& parallel_for);
void run(const GatedNormForward& p, const ParallelFor& parallel_for);
void run(const GatedNormQuantizedForward& p, const ParallelFor& parallel_for);
void run(const GroupNormForward& p, const ParallelFor& parallel_for);
void run(const SandwichNormForward& p, const ParallelFor& parallel_for);
void run(const NormBackward& p, const ParallelFor& parallel_for);
void run(const GatedNormBackward& p, const ParallelFor& parallel_for);
void run(const GroupNormBackward& p, const ParallelFor& parallel_for);
void run(const SandwichNormBackward& p, const ParallelFor& parallel_for);
void run(const QkNormRotaryForward& p, const ParallelFor& parallel_for);
void run(const QkNormRotaryBackward& p, const ParallelFor& parallel_for);
void run(const SoftmaxForward& p, const ParallelFor& parallel_for);
void run(const SoftmaxBackward& p, const ParallelFor& parallel_for);
void run(const LogSoftmaxBackward& p, const ParallelFor& parallel_for);
void run(const CrossEntropyForward& p, const ParallelFor& parallel_for);
void run(const CrossEntropyBackward& p, const ParallelFor& parallel_for);

// The instruction set that this processor's kernels were compiled for: "avx512", "avx2" or "baseline".
const char* isa();

}  // namespace jaxnorm::cpu
