// Gated RMSNorm with a result of 8 bits: y of gated_norm.h, in f32 and never stored, quantised as quantized_norm.h
// says.
#pragma once

#include "ops/gated_norm.h"
#include "ops/quantized_norm.h"

namespace jaxnorm {

// Of rows of up to kGatedCols, without a bias or an addend. smooth has a row for each of scale's.
struct GatedNormQuantizedForward : QuantizedNormForward, Gated {};

}  // namespace jaxnorm
