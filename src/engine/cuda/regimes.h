// The regimes of the forward. From an entry of these tables follow the plan of the rows that it serves, the type that
// their kernels are compiled for, and the registers that these have.
#pragma once

#include <cstddef>

#include "engine/cuda/plan.h"

namespace jaxnorm::cuda {

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
  static constexpr int kSize = static_cast<int>(SIZE);
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

// Gated rows with a block for themselves. FIRST: their second operand is applied before the statistics, and not kept.
template <int BYTES, bool FIRST>
inline constexpr RegimeTable<2> kGatedBlockRows{{
    {kWholeBlock, 4, 1, kMaxThreads, kMaxThreads, false},
    {kWholeBlock, 8, 1, kMaxThreads, kMaxThreads, false},
}};
template <>
inline constexpr RegimeTable<1> kGatedBlockRows<2, true>{{
    {kWholeBlock, 4, 1, kMaxThreads, kMaxThreads, false},
}};
// A thread has no room for eight vectors of both operands: four, as long as two blocks of as many threads fit.
template <>
inline constexpr RegimeTable<2> kGatedBlockRows<2, false>{{
    {kWholeBlock, 4, 1, 384, 384, false, {64, 80}},
    {kWholeBlock, 8, 1, 256, 256, false, {64, 128}},
}};

// A row takes the first regime that has room for it. Each table is a type, so that a regime may be a type too.
template <int BYTES>
struct ForwardRegimes {
  static constexpr auto kTable = kShortRows<BYTES> + kBlockRows<BYTES> + kLongRows;
};

// The same for gated rows, of up to kGatedCols.
template <int BYTES, bool FIRST>
struct GatedForwardRegimes {
  static constexpr auto kTable = kShortRows<BYTES> + kGatedBlockRows<BYTES, FIRST>;
};

// And for rows of logits. Nothing of a row is kept, so that one block goes through it however long it is, and several
// share a multiprocessor: while some wait for their rows, others compute.
template <int BYTES>
struct OneBlockRegimes {
  static constexpr auto kTable = kShortRows<BYTES> + RegimeTable<2>{{
                                                         {kWholeBlock, 4, 1, 256, 256, false},
                                                         {kWholeBlock, kStreamed, 1, 256, 256, false},
                                                     }};
};

// Rows of which two arrays are kept, of any length. One block of f32 has no room for eight vectors of both.
template <int BYTES>
struct PairRegimes {
  static constexpr auto kTable = kShortRows<BYTES> + kGatedBlockRows<BYTES, false> + kLongRows;
};
template <>
struct PairRegimes<4> {
  static constexpr RegimeTable<1> kBlock{{{kWholeBlock, 4, 1, kMaxThreads, kMaxThreads, false}}};
  static constexpr auto kTable = kShortRows<4> + kBlock + kLongRows;
};

// Rows of which few columns are read, and all are written: a block goes through what is read as through a row of its
// own. Instructions bound it as much as memory does, most of which a thread needs however few columns it has, so that
// few threads have up to eight vectors each.
struct WindowRegimes {
  static constexpr RegimeTable<2> kTable{{
      {kWholeBlock, 8, 1, 256, 256, false, Registers::all(80)},
      {kWholeBlock, kStreamed, 1, 256, 256, false},
  }};
};

}  // namespace jaxnorm::cuda
