#include "engine/cuda/plan.h"

namespace jaxnorm::cuda {

const char* Plan::regime() const {
  if (vectors == kStreamed) return segments > 0 ? "segments" : "looped";
  if (blocks_per_row > 1) return "cluster per row";
  return rows_per_block > 1 ? "rows per block" : "block per row";
}

Plan make_forward_plan(bool centred, Dtype x, int64_t cols, int max_cluster) {
  return plan_from<ForwardRegimes>(centred, x, cols, max_cluster);
}

Plan make_one_block_plan(Dtype x, int64_t cols) { return plan_from<OneBlockRegimes>(false, x, cols, 1); }

bool has_tickets(bool centred, Dtype x, int64_t cols) {
  const Plan plan = make_forward_plan(centred, x, cols, kMaxCluster);
  return is_dynamic(centred, x) && plan.blocks_per_row > 1 && plan.vectors != kStreamed && cols % vector_of(x) == 0;
}

}  // namespace jaxnorm::cuda
