// The regimes of softmax's rows that do not go as those of norms do, see engine/cuda/plan.h.
#pragma once

#include "engine/cuda/plan.h"

namespace jaxnorm::cuda {

// Rows of which two arrays are kept, of any length. One block of f32 has no room for eight vectors of both.
template <int BYTES>
struct PairRegimes {
  static constexpr auto kTable = kShortRows<BYTES> + kTwoArrayRows<BYTES> + kLongRows;
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

static_assert(serves_any_row(PairRegimes<2>::kTable) && serves_any_row(PairRegimes<4>::kTable));
static_assert(serves_any_row(WindowRegimes::kTable));

// The plan of rows of two arrays with one sum each.
inline Plan make_pair_plan(Dtype x, int64_t cols, int max_cluster) {
  return plan_from<PairRegimes>(false, x, cols, max_cluster);
}

inline Plan make_window_plan(Dtype x, int64_t cols) { return plan_from(WindowRegimes::kTable, false, x, cols, 1); }

}  // namespace jaxnorm::cuda
