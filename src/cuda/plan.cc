#include "cuda/plan.h"

#include <algorithm>

namespace jaxnorm::cuda {
namespace {

constexpr int kWarp = 32;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Plan rows_per_block(int threads, int vectors) { return {threads, vectors, kRowsBlockThreads / threads, 1}; }

Plan block_per_row(int64_t row_vectors, int vectors, int blocks) {
  const int64_t threads = ceil_div(ceil_div(row_vectors, blocks), vectors);
  return {static_cast<int>(ceil_div(threads, kWarp) * kWarp), vectors, 1, blocks};
}

}  // namespace

const char* Plan::regime() const {
  if (vectors == kStreamed) return "looped";
  if (blocks_per_row > 1) return "cluster per row";
  return rows_share_block() ? "rows per block" : "block per row";
}

Plan make_plan(Op op, Dtype x, int64_t cols, int max_cluster) {
  const int64_t row = ceil_div(cols, vector_of(x));
  // The backward holds x, dy and its share of dscale and dbias: 32 elements of each are what 128 registers allow.
  const int most = op == Op::forward ? 8 : 32 / vector_of(x);

  if (row <= 8) return rows_per_block(8, 1);
  if (row <= 16) return rows_per_block(8, 2);
  if (row <= 32) return rows_per_block(8, 4);
  if (row <= 64) return rows_per_block(32, 2);
  if (row <= 128) return rows_per_block(32, 4);
  if (row <= 256 && most == 8) return rows_per_block(32, 8);

  if (row <= 4 * 256) return block_per_row(row, 4, 1);
  for (int blocks = 1; blocks <= std::min(max_cluster, kMaxCluster); blocks *= 2)
    if (row <= static_cast<int64_t>(most) * kMaxThreads * blocks) return block_per_row(row, most, blocks);
  return {kMaxThreads, kStreamed, 1, std::min(max_cluster, 8)};
}

int64_t partial_rows(Dtype x, int64_t cols) {
  // As many teams as run at once on the 132 multiprocessors of an H100/H200, at 128 registers a thread. Larger clusters
  // have to fit the 16 multiprocessors that every processing cluster of the chip has.
  const Plan plan = make_plan(Op::backward, x, cols, kMaxCluster);
  if (plan.vectors == kStreamed) return 16;
  if (plan.blocks_per_row > 1) return plan.blocks_per_row == 2 ? 66 : 128 / plan.blocks_per_row;
  return 132 * std::max(1, kMaxThreads / plan.block_threads());
}

}  // namespace jaxnorm::cuda
