// Softmax and log-softmax. With z = x * scale, and sums and maxima over the columns that count:
//
//   logsumexp = log(sum(exp(z - max(z)))) + max(z)
//   softmax:      y = exp(z - logsumexp), 0 where a column does not count, as all are of a row where none does
//                 dx = scale * y * (dy - sum(dy * y))
//   log-softmax:  y = z - logsumexp, -inf where a column does not count
//                 dx = scale * (dy - exp(z - logsumexp) * sum(dy)), 0 where a column does not count
#pragma once

#include "ops/mask.h"

namespace jaxnorm {

struct SoftmaxForward {
  int64_t rows, cols;
  Input x;
  Mask mask;
  Output y;
  float* logsumexp;  // of log-softmax, a value a row; null where it is not wanted
  float scale;
  bool log;
  Workspace workspace;
};

struct SoftmaxBackward {
  int64_t rows, cols;
  Input dy, y;  // of one dtype
  Mask mask;    // without `where`: y is 0 there
  Output dx;
  float scale;
};

struct LogSoftmaxBackward {
  int64_t rows, cols;
  Input dy, x;
  Mask mask;
  const float* logsumexp;
  Output dx;  // of x's dtype
  float scale;
};

}  // namespace jaxnorm
