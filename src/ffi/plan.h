// What Python may ask of launch plans. The norms answer, in ops/norm/cuda/plan.cc, for all rows that go as theirs do:
// it is part of each module, whatever ops are.
#pragma once

#include <optional>

#include "engine/cuda/plan.h"

namespace jaxnorm::cuda {

struct PlanQuestion {
  bool forward, centred;  // centred: the statistics have a mean
  Dtype x;
  int64_t cols;
  int max_cluster;  // the largest of the device
  bool is_gated, gate_first;
  bool adds;  // another array
};

struct PlanAnswer {
  Plan plan;
  int rows_at_once;  // of a thread group
  int registers;     // the most that a thread has where results are not quantised
};

// Nothing where no kernel has gates for such rows.
std::optional<PlanAnswer> answer(const PlanQuestion& asked);

}  // namespace jaxnorm::cuda
