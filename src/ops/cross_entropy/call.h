// What cross-entropy with integer labels needs of a row of logits x. With z = soft_cap * tanh(x * scale / soft_cap), or
// z = x * scale without a soft cap, and sums and maxima over the columns that count:
//
//   log_sum = log(sum(exp(z - max(z)))),   label_logit = z[label] - max(z),   total = sum(z - max(z))
//   dx = dz/dx * (dlog_sum * exp(z - max(z) - log_sum) + dlabel_logit * (column == label) + dtotal)
//
// A label that names no column has label_logit 0. dx is 0 where a column does not count, but for a label's there: it
// has its label_logit, and the gradient of that, which is 0 where dlabel_logit is, whatever x is. So is all of a row
// whose label is kIgnored. A row that is -inf throughout may be a shard of another: exp(...) is 0 then.
#pragma once

#include <cstdint>

#include "operands.h"
#include "ops/shared/logits.h"

namespace jaxnorm {

constexpr int32_t kIgnored = INT32_MIN;

struct Logits {
  int64_t rows, cols;
  Input x;
  const int32_t* labels;  // a value a row, as have all arrays of f32 below
  Mask mask;              // without lengths
  Scale scale;
  float soft_cap;  // 0: there is none
};

// In programs of before top is null, and counts as 0: the others are relative to that.
struct CrossEntropyForward : Logits {
  float *log_sum, *label_logit;
  float* total;  // null where it is not wanted
  float* top;
};

struct CrossEntropyBackward : Logits {
  const float *log_sum, *dlog_sum, *top;
  const float *dlabel_logit, *dtotal;  // null: zeros
  Output dx;                           // of x's dtype; it may take x's place
};

namespace cpu {

// std::bad_alloc: there is no memory for f32 weights, for rows or for sums over them.
void run(const CrossEntropyForward& p, const ParallelFor& parallel_for);
void run(const CrossEntropyBackward& p, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

Outcome run(const CrossEntropyForward& p, Stream stream);
Outcome run(const CrossEntropyBackward& p, Stream stream);

}  // namespace cuda

}  // namespace jaxnorm
