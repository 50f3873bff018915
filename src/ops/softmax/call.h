// Softmax and log-softmax. With z = x * scale, and sums and maxima over the columns that count:
//
//   log_sum = log(sum(exp(z - max(z))))
//   softmax:      y = exp(z - max(z) - log_sum), 0 where a column does not count, as all are of a row where none does
//                 dx = scale * y * (dy - sum(dy * y))
//   log-softmax:  y = z - max(z) - log_sum, -inf where a column does not count
//                 dx = scale * (dy - exp(y) * sum(dy))
//
// dx is 0 where a column does not count, and what x, y and dy are there does not matter.
#pragma once

#include "operands.h"
#include "ops/shared/logits.h"

namespace jaxnorm {

struct SoftmaxForward {
  int64_t rows, cols;
  Input x;
  Mask mask;
  Output y;
  // Of log-softmax, a value a row; null where they are not wanted. In programs of before top is null, and log_sum has
  // max(z) added.
  float *log_sum, *top;
  Scale scale;
  bool log;
  Workspace workspace;
};

struct SoftmaxBackward {
  int64_t rows, cols;
  Input dy, y;  // of one dtype
  Mask mask;    // in programs of before without `where`
  Output dx;
  Scale scale;
};

struct LogSoftmaxBackward {
  int64_t rows, cols;
  Input dy, x;
  Mask mask;
  const float *log_sum, *top;  // as they were written
  Output dx;                   // of x's dtype
  Scale scale;
};

namespace cpu {

// std::bad_alloc: there is no memory for f32 weights, for rows or for sums over them.
void run(const SoftmaxForward& p, const ParallelFor& parallel_for);
void run(const SoftmaxBackward& p, const ParallelFor& parallel_for);
void run(const LogSoftmaxBackward& p, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

Outcome run(const SoftmaxForward& p, Stream stream);
Outcome run(const SoftmaxBackward& p, Stream stream);
Outcome run(const LogSoftmaxBackward& p, Stream stream);

// Of log-softmax too.
WorkspaceSize softmax_workspace(const WorkspaceQuery& query);

}  // namespace cuda

}  // namespace jaxnorm
