// Gated activations:
//
//   y = activation(gate) * up
//   dgate = dy * up * activation'(gate),   dup = dy * activation(gate)
#pragma once

#include "operands.h"
#include "ops/shared/activation.h"
#include "ops/shared/quantization.h"

namespace jaxnorm {

// Rows of y are contiguous. Those of gate, up and their gradients begin `stride` elements apart: twice as many as y has
// where one array holds both, the gate first in each row.
struct GatedShape {
  int64_t rows, cols, stride;
};

// Arrays of one dtype.
struct GatedActivationForward : GatedShape {
  Input gate, up;
  Output y;
  Activation activation;
};

// y in f32, whatever the dtype of gate and up, and quantised.
struct GatedActivationQuantizedForward : GatedShape {
  Input gate, up;
  Quantization quantized;
  Activation activation;
};

struct GatedActivationBackward : GatedShape {
  Input dy, gate, up;
  Output dgate, dup;  // each where it is wanted
  Activation activation;
};

namespace cpu {

void run(const GatedActivationForward& p, const ParallelFor& parallel_for);
// std::bad_alloc: there is no memory for a row.
void run(const GatedActivationQuantizedForward& p, const ParallelFor& parallel_for);
void run(const GatedActivationBackward& p, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

Outcome run(const GatedActivationForward& p, Stream stream);
Outcome run(const GatedActivationQuantizedForward& p, Stream stream);
Outcome run(const GatedActivationBackward& p, Stream stream);

}  // namespace cuda

}  // namespace jaxnorm
