#include "cuda/plan.h"

#include <algorithm>

namespace jaxnorm::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kMultiprocessors = 132;  // of an H100 or H200, for which the numbers of teams are chosen
constexpr int kClusterable = 120;      // of them, in clusters of 8: the others are the remainders of their GPCs

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Plan rows_per_block(int threads, int vectors) { return {threads, vectors, kRowsBlockThreads / threads, 1}; }

Plan block_per_row(int64_t row_vectors, int vectors, int blocks) {
  const int64_t threads = ceil_div(ceil_div(row_vectors, blocks), vectors);
  return {static_cast<int>(ceil_div(threads, kWarp) * kWarp), vectors, 1, blocks};
}

}  // namespace

const char* Plan::regime() const {
  if (segments > 0) return "segments";
  if (vectors == kStreamed) return "looped";
  if (blocks_per_row > 1) return "cluster per row";
  return rows_share_block() ? "rows per block" : "block per row";
}

Plan make_plan(Op op, Dtype x, int64_t cols, int max_cluster) {
  const int64_t row = ceil_div(cols, vector_of(x));
  if (row <= 8) return rows_per_block(8, 1);
  if (row <= 16) return rows_per_block(8, 2);
  if (row <= 32) return rows_per_block(8, 4);
  if (row <= 64) return rows_per_block(32, 2);
  if (row <= 128) return rows_per_block(32, 4);

  if (op == Op::forward && row <= 256) return block_per_row(row, 4, 1);
  const int vectors = op == Op::forward ? kForwardVectors : backward_vectors(vector_of(x));
  const int largest = op == Op::forward ? max_cluster : std::min(max_cluster, kBackwardCluster);
  for (int blocks = 1; blocks <= largest; blocks *= 2)
    if (row <= static_cast<int64_t>(vectors) * kMaxThreads * blocks) return block_per_row(row, vectors, blocks);

  if (op == Op::forward) return {kMaxThreads, kStreamed, 1, std::min(max_cluster, 8)};
  return {kSegmentThreads, kStreamed, 1, 1, static_cast<int>(ceil_div(cols, kSegment))};
}

int row_segments(Dtype x, int64_t cols) { return make_plan(Op::backward, x, cols, 1).segments; }

int64_t partial_rows(Kind kind, Dtype x, int64_t cols) {
  const Plan plan = make_plan(Op::backward, x, cols, kMaxCluster);
  if (plan.segments > 0) {
    // About two blocks of columns a multiprocessor, or four.
    return std::clamp<int64_t>(2 * kMultiprocessors * kColumnThreads * vector_of(x) / cols, 4, 64);
  }
  // As many teams as run at once, at 128 registers a thread, more where layer norm's rows share a block; of clusters
  // four times as many, since how many run at once varies from chip to chip.
  if (plan.blocks_per_row > 1) return 4 * kClusterable / plan.blocks_per_row;
  return kMultiprocessors * (kind == Kind::layer && plan.rows_share_block() ? 3 : kMaxThreads / plan.block_threads());
}

}  // namespace jaxnorm::cuda
