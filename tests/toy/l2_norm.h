// An L2 norm, as an op that is not part of the package: its struct for each direction.
//
//   y  = x_hat,   x_hat = x * rstd,   rstd = rsqrt(sum(x²) + epsilon)
//   dx = rstd * (dy - x_hat * sum(dy * x_hat))
#pragma once

#include "operands.h"

namespace toy {

struct L2NormForward {
  int64_t rows, cols;
  jaxnorm::Input x;
  jaxnorm::Output y;  // of x's dtype
  float* rstd;        // a value a row; null where it is not wanted
  float epsilon;
};

struct L2NormBackward {
  int64_t rows, cols;
  jaxnorm::Input dy, x;  // of one dtype
  const float* rstd;     // a value a row
  jaxnorm::Output dx;
};

}  // namespace toy
