// Elementwise, of `count` neighbours in an array.
#pragma once

#include <cstdint>

#include "operands.h"

namespace jaxnorm::cpu {

struct ArrayKernels {
  static const ArrayKernels baseline, avx2, avx512;

  void (*add)(const float* from, float* into, int64_t count);
  void (*cast)(const float* from, Output into, int64_t count);
  void (*widen)(Input from, float offset, float* into, int64_t count);  // writes from + offset
};

}  // namespace jaxnorm::cpu
