// Gated RMSNorm with a result of 8 bits: y of gated.h, in f32 and never stored, as of `Quantization`, of rows of up to
// kGatedCols; and what runs it.
#pragma once

#include "ops/norm/gated.h"
#include "ops/norm/quantized.h"
#include "platforms.h"

namespace jaxnorm {

// Without a bias or an addend. smooth has a row for each of scale's.
struct GatedNormQuantizedForward : QuantizedNormForward, Gated {};

namespace cpu {

// std::bad_alloc: there is no memory for f32 weights or for rows.
void run(const GatedNormQuantizedForward& p, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

Outcome run(const GatedNormQuantizedForward& p, Stream stream);

}  // namespace cuda

}  // namespace jaxnorm
