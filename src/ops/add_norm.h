// The norm of sum = x + addend, which is rounded to the addend's dtype and normalised as it is stored.
#pragma once

#include "ops/norm.h"

namespace jaxnorm {

// What x is added to before it is normalised.
struct AddFirst {
  Input addend;  // absent: x is normalised
  Output sum;    // may lie where the addend does
};

struct AddNormForward : NormForward, AddFirst {};

// sum = a + b, rounded to b's dtype; sum may lie where b does. Without b, a rounded to sum's dtype.
struct Addition {
  Input a, b;
  Output sum;
};

template <class Op>
Addition addition_of(const Op& p) {
  return {p.x, p.addend, p.sum};
}

// The op of a sum that is stored already.
template <class Op>
Op of_sum(Op p) {
  p.x = {p.sum.data, p.sum.dtype};
  static_cast<AddFirst&>(p) = {};
  return p;
}

}  // namespace jaxnorm
