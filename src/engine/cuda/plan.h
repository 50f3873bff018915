// The launch plan: a pure function of row length and dtypes, so that a row's result never depends on the number of rows
// beside it (design law: batch invariance) and so that a captured CUDA graph always holds the same kernels. Small
// batches have kernels of their own, with as many threads and vectors and sums in the same order.
//
// Forward plans are made from tables of regimes. From an entry follow the plan of the rows that it serves, the type
// that their kernels are compiled for, and the registers that these have.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "operands.h"

namespace jaxnorm::cuda {

// Elements of a vector of 16 bytes of x, the unit in which a thread reads and writes.
constexpr int vector_of(Dtype x) { return 16 / size_of(x); }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int kWarp = 32;
constexpr int kWholeBlock = -2;   // threads of a thread group: all of the block's, in a cluster of each block's
constexpr int kWholeWarps = -1;   // whole warps, and there may be other thread groups in the block
constexpr int kStreamed = 0;      // vectors a thread: none are kept, the row is read again in each pass
constexpr int kMaxThreads = 512;  // threads a block: leaves 128 registers a thread
constexpr int kMaxCluster = 16;   // blocks a cluster
constexpr int kRowsThreads = 64;  // threads a block where rows share a block of the forward

// Multiprocessors of an H100 or H200, for which numbers of blocks are chosen: a GPU's own would give its own order of
// sums.
constexpr int kMultiprocessors = 132;

// How many rows of so many arrays a thread group of the forward has under way at once. Of short rows it has several, so
// that a thread has four vectors on their way.
constexpr int rows_at_once(int threads_per_row, int vectors, int arrays = 1) {
  return threads_per_row > 0 && threads_per_row <= kWarp && vectors * arrays < 4 ? 4 / (vectors * arrays) : 1;
}

struct Plan {
  int threads_per_row;  // of one block: 8, 16 or 32 of a warp, or whole warps
  int vectors;          // per thread; kStreamed for a looped row
  int rows_per_block;   // and thread groups, where a thread group has one row
  int blocks_per_row;   // more than 1: a cluster
  int segments = 0;     // of a row that two kernels work on: one sums up each segment, one finishes column by column
  int entry = -1;       // of the forward: its regime's entry in the table that the plan was made from

  int block_threads() const { return threads_per_row * rows_per_block; }

  // Blocks, or clusters, with a thread group for every `at_once` rows.
  int64_t blocks_of(int64_t rows, int at_once) const {
    const int64_t of_block = int64_t{rows_per_block} * at_once;
    return (rows + of_block - 1) / of_block;
  }
  const char* regime() const;
};

// A row of `row` vectors in whole warps of as many blocks as `blocks`; `threads`: as many of a block as rows may share.
constexpr Plan whole_warps(int64_t row, int vectors, int blocks, int threads = 0) {
  const int per_row = static_cast<int>(ceil_div(ceil_div(ceil_div(row, blocks), vectors), kWarp)) * kWarp;
  return {per_row, vectors, std::max(1, threads / per_row), blocks};
}

// Registers of a thread, by what a kernel keeps in them.
struct Registers {
  int one_array = 64;   // a row of one array, or several rows if they are short
  int two_arrays = 64;  // rows of two arrays
  int weights = 64;     // a row, and the packed scale beside it
  // A row as floats, on its way to 8 bits: where many rows wait, more warps help more than room does.
  int quantized = 64;
  int quantized_centred = 64;  // the same, with statistics that have a mean
  int quantized_roomy = 64;    // with room to spare, for small batches and rows of two arrays

  static constexpr Registers all(int registers) {
    return {registers, registers, registers, registers, registers, registers};
  }
};

struct ForwardRegime {
  int threads;          // that share a row: 8 or 32 of a warp, or kWholeBlock
  int vectors;          // of a thread, or kStreamed
  int blocks;           // that share a row, at most
  int block_threads;    // at most
  int centred_threads;  // the same for statistics with a mean, of rows that vectors divide
  bool divided_only;    // whether it is only for rows that vectors divide
  Registers registers = {};
};

template <size_t SIZE>
struct RegimeTable {
  ForwardRegime entry[SIZE];
};

// Rows that share a block, of elements of BYTES. Four vectors under way take 80 registers.
template <int BYTES>
inline constexpr RegimeTable<5> kShortRows{{
    {8, 1, 1, kRowsThreads, kRowsThreads, false, {80, 64, 80, 56, 64, 64}},
    {8, 2, 1, kRowsThreads, kRowsThreads, false, {80, 64, 80, 56, 64, 64}},
    {8, 4, 1, kRowsThreads, kRowsThreads, false, {80, 80, 80, 56, 64, 64}},
    {kWarp, 2, 1, kRowsThreads, kRowsThreads, false, {80, 64, 80, 56, 64, 64}},
    {kWarp, 4, 1, kRowsThreads, kRowsThreads, false, {80, 80, 80, 56, 56, 64}},
}};
template <>
inline constexpr RegimeTable<5> kShortRows<4>{{
    {8, 1, 1, kRowsThreads, kRowsThreads, false, {80, 64, 80, 40, 40, 64}},
    {8, 2, 1, kRowsThreads, kRowsThreads, false, {80, 64, 80, 40, 40, 64}},
    {8, 4, 1, kRowsThreads, kRowsThreads, false, {80, 80, 80, 40, 40, 64}},
    {kWarp, 2, 1, kRowsThreads, kRowsThreads, false, {80, 64, 80, 40, 40, 64}},
    {kWarp, 4, 1, kRowsThreads, kRowsThreads, false, {80, 80, 80, 40, 40, 64}},
}};

// Rows too long for one block: in registers or shared memory of a cluster, or read again in each pass.
inline constexpr RegimeTable<4> kLongRows{{
    {kWholeBlock, 4, kMaxCluster, kMaxThreads, kMaxThreads, false},
    {kWholeBlock, 8, kMaxCluster, kMaxThreads, kMaxThreads, false},
    {kWholeBlock, kStreamed, 8, kMaxThreads, kMaxThreads, false},
    {kWholeBlock, kStreamed, 1, kMaxThreads, kMaxThreads, false},
}};

template <size_t A, size_t B>
constexpr RegimeTable<A + B> operator+(const RegimeTable<A>& a, const RegimeTable<B>& b) {
  RegimeTable<A + B> sum{};
  for (size_t i = 0; i < A + B; ++i) sum.entry[i] = i < A ? a.entry[i] : b.entry[i - A];
  return sum;
}

// Rows with a block for themselves. Eight vectors of a half type take twice as many registers once they are unpacked.
// Of 192 threads with 96 registers three blocks fit a multiprocessor; rows that vectors do not divide take more. With
// 64 registers beside a scale the compiler would put off its loads until the row's statistics are known.
template <int BYTES>
inline constexpr RegimeTable<3> kBlockRows{{
    {kWholeBlock, 4, 1, 256, 256, false, {64, 64, 80, 48, 48, 64}},
    {kWholeBlock, 8, 1, 192, 192, true, Registers::all(96)},
    {kWholeBlock, 8, 1, 256, 256, false, Registers::all(128)},
}};
// With a mean, twice the vectors are faster than more than 256 threads, unless rows go by elements.
template <>
inline constexpr RegimeTable<2> kBlockRows<4>{{
    {kWholeBlock, 4, 1, kMaxThreads, 256, false, {64, 64, 64, 40, 40, 40}},
    {kWholeBlock, 8, 1, kMaxThreads, kMaxThreads, false},
}};

// The same of rows of two arrays. A thread has no room for eight vectors of half types of both: four, as long as two
// blocks of as many threads fit.
template <int BYTES>
inline constexpr RegimeTable<2> kTwoArrayRows{{
    {kWholeBlock, 4, 1, 384, 384, false, {64, 80}},
    {kWholeBlock, 8, 1, 256, 256, false, {64, 128}},
}};
template <>
inline constexpr RegimeTable<2> kTwoArrayRows<4>{{
    {kWholeBlock, 4, 1, kMaxThreads, kMaxThreads, false},
    {kWholeBlock, 8, 1, kMaxThreads, kMaxThreads, false},
}};

// A row takes the first regime that has room for it. Each table is a type, so that a regime may be a type too.
template <int BYTES>
struct ForwardRegimes {
  static constexpr auto kTable = kShortRows<BYTES> + kBlockRows<BYTES> + kLongRows;
};

// The same for rows of which nothing is kept, so that one block goes through it however long it is, and several share a
// multiprocessor: while some wait for their rows, others compute.
template <int BYTES>
struct OneBlockRegimes {
  static constexpr auto kTable = kShortRows<BYTES> + RegimeTable<2>{{
                                                         {kWholeBlock, 4, 1, 256, 256, false},
                                                         {kWholeBlock, kStreamed, 1, 256, 256, false},
                                                     }};
};

// The plan of the first regime of a table that has room for a row. `centred`: its statistics have a mean.
// `max_cluster`: the largest cluster the device can launch, 1 where it has none.
template <size_t SIZE>
constexpr Plan plan_from(const RegimeTable<SIZE>& table, bool centred, Dtype x, int64_t cols, int max_cluster) {
  const int64_t row = ceil_div(cols, vector_of(x));
  const bool is_divided = cols % vector_of(x) == 0;
  for (int i = 0; i < static_cast<int>(SIZE); ++i) {
    const ForwardRegime& regime = table.entry[i];
    if (regime.divided_only && !is_divided) continue;
    if (regime.vectors == kStreamed) {
      if (regime.blocks > 1 && max_cluster == 1) continue;
      return {regime.block_threads, kStreamed, 1, std::min(max_cluster, regime.blocks), 0, i};
    }
    if (regime.threads > 0) {
      if (row <= int64_t{regime.vectors} * regime.threads)
        return {regime.threads, regime.vectors, regime.block_threads / regime.threads, 1, 0, i};
      continue;
    }
    const int threads = centred && is_divided ? regime.centred_threads : regime.block_threads;
    for (int blocks = regime.blocks > 1 ? 2 : 1; blocks <= std::min(regime.blocks, max_cluster); blocks *= 2)
      if (row <= int64_t{regime.vectors} * threads * blocks) {
        Plan plan = whole_warps(row, regime.vectors, blocks);
        plan.entry = i;
        return plan;
      }
  }
  return {};
}

// The same of a table that there is for each size of elements.
template <template <int> class REGIMES>
constexpr Plan plan_from(bool centred, Dtype x, int64_t cols, int max_cluster) {
  return x == Dtype::f32 ? plan_from(REGIMES<4>::kTable, centred, x, cols, max_cluster)
                         : plan_from(REGIMES<2>::kTable, centred, x, cols, max_cluster);
}

// Whether a table serves rows of any length, with clusters and without: its last regime has room for the longest.
template <size_t SIZE>
constexpr bool serves_any_row(const RegimeTable<SIZE>& table) {
  const auto serves = [&](int max_cluster) {
    return plan_from(table, false, Dtype::f32, int64_t{1} << 50, max_cluster).entry >= 0;
  };
  return serves(1) && serves(kMaxCluster);
}
static_assert(serves_any_row(ForwardRegimes<2>::kTable) && serves_any_row(ForwardRegimes<4>::kTable));
static_assert(serves_any_row(OneBlockRegimes<2>::kTable) && serves_any_row(OneBlockRegimes<4>::kTable));

Plan make_forward_plan(bool centred, Dtype x, int64_t cols, int max_cluster);

// That of rows that are read once and have one block, however long they are.
Plan make_one_block_plan(Dtype x, int64_t cols);

// Whether clusters of the forward have a dynamic schedule for rows of x that vectors divide, which takes a count in
// global memory. Statistics of half types that have a mean leave no time for it.
constexpr bool is_dynamic(bool centred, Dtype x) { return !centred || x == Dtype::f32; }

// Whether rows of so many columns want that count, on any device.
bool has_tickets(bool centred, Dtype x, int64_t cols);

// What Python may ask of launch plans. The norms answer, in ops/norm/cuda/plan.cc, for all rows that go as theirs do:
// it is part of each module, whatever ops are.

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
