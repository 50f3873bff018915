// The norm of sum = x + residual, which is rounded to the residual's dtype and normalised as it is stored.
#pragma once

#include "ops/norm.h"

namespace jaxnorm {

struct AddNormForward : NormForward {
  Input residual;
  Output sum;  // may lie where the residual does
};

}  // namespace jaxnorm
