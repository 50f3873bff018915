// The next token of each row of logits l, drawn by the row's uniform number u at its temperature T:
//
//   e[i] = exp((l[i] - max(l)) / T)    for the columns i that count
//   kept: by descending l, equals by ascending i, the first top_k; of these the shortest prefix with a sum of e of at
//         least top_p times theirs; of these those with e[i] >= min_p
//   id = the first kept i, by ascending i, so that the sum of the kept e up to i is greater than u * sum(kept e), or
//        else the last kept i with e[i] > 0
//   log_prob = (l[id] - max(l)) / T - log(sum(kept e))
//
// The column of max(l), of equals the first, is always kept. A top_k of 0, -1 or more than there are columns keeps all,
// and so does a top_p of 1 or more. T = 0: id is the column of max(l), and log_prob is 0.
//
// A row has id -1 and log_prob NaN if a column that counts is NaN or +inf, if none is above -inf, or if one of its
// numbers is none that it may have: a finite T from 0 on, a top_k from -1 on, a number as top_p, a min_p from 0 on, u
// in [0, 1).
#pragma once

#include <cstdint>

#include "operands.h"
#include "ops/shared/logits.h"

namespace jaxnorm {

// So that int32 counts what a kernel looks ahead, too.
constexpr int64_t kMostColumns = (int64_t{1} << 31) - (1 << 12);

struct Sample {
  int64_t rows, cols;
  Input logits;          // rows * cols
  const float* uniform;  // a value a row, as have all arrays below
  const float* temperature;
  const int32_t* top_k;        // null: all are kept
  const float *top_p, *min_p;  // null: likewise
  Mask mask;                   // where alone
  int32_t* ids;
  float* log_probs;
};

namespace cpu {

// std::bad_alloc: there is no memory for a row.
void run(const Sample& p, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

Outcome run(const Sample& p, Stream stream);

}  // namespace cuda

}  // namespace jaxnorm
