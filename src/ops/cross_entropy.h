// What cross-entropy with integer labels needs of a row of logits x. With z = soft_cap * tanh(x * scale / soft_cap), or
// z = x * scale without a soft cap, and sums and maxima over the columns that count:
//
//   logsumexp = log(sum(exp(z - max(z)))) + max(z),   label_logit = z[label],   total = sum(z)
//   dx = dz/dx * (dlogsumexp * exp(z - logsumexp) + dlabel_logit * (column == label) + dtotal)
//
// A label that names no column has label_logit 0. dx is 0 where a column does not count, but for a label's there: it
// has its label_logit, and the gradient of that.
#pragma once

#include "ops/mask.h"

namespace jaxnorm {

struct Logits {
  int64_t rows, cols;
  Input x;
  const int32_t* labels;  // a value a row, as have all arrays of f32 below
  Mask mask;              // without lengths
  float scale, soft_cap;  // soft_cap 0: there is none
};

struct CrossEntropyForward : Logits {
  float *logsumexp, *label_logit;
  float* total;  // null where it is not wanted
};

struct CrossEntropyBackward : Logits {
  const float *logsumexp, *dlogsumexp;
  const float *dlabel_logit, *dtotal;  // null: zeros
  Output dx;                           // of x's dtype; it may take x's place
};

}  // namespace jaxnorm
