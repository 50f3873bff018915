// The loop over rows of every forward op, which is given as functors:
//
//   load.rows<R>(first, count)   -> Rows<R, T>  what is normalised; load.ahead(traffic, elements) as elements_ahead()
//   Stats                                       see stats.h
//   epilogue(row, stats, reader)                writes a row of results; `reader` reads what is normalised once more
#pragma once

#include "engine/cpu/memory.h"
#include "engine/cpu/stats.h"

namespace jaxnorm::cpu {
namespace {

// A row whose sums are over sooner than their horizontal additions, root and quotient goes with three others, so that
// these wait together. It has one accumulator for each sum then, whatever rows are beside it.
constexpr int64_t kShort = 512;
constexpr int kTogether = kChains;

// R rows at a time.
template <int R, class Stats, class Op, class Load, class Epilogue>
void for_rows(const Op& p, int64_t begin, int64_t end, int64_t traffic, Load load, Epilogue epilogue) {
  const int64_t ahead = load.ahead(traffic, R * p.cols);
  for (int64_t first = begin; first < end; first += R) {
    const int64_t count = end - first < R ? end - first : R;
    const auto rows = load.template rows<R>(first, count);
    using Element = typename decltype(load.template rows<R>(0, 0))::Element;
    Stats stats[R];
    Stats::template of<R>(rows, p, stats);
    for (int64_t i = 0; i < count; ++i) {
      stats[i].save(p, first + i);
      epilogue(first + i, stats[i], RowReader<Element>{rows.data[i], ahead});
    }
  }
}

// Rows [begin, end). `traffic`: how many bytes all rows of the call read and write.
template <class Stats, class Op, class Load, class Epilogue>
void for_rows(const Op& p, int64_t begin, int64_t end, int64_t traffic, Load load, Epilogue epilogue) {
  if (p.cols <= kShort) {
    for_rows<kTogether, Stats>(p, begin, end, traffic, load, epilogue);
  } else {
    for_rows<1, Stats>(p, begin, end, traffic, load, epilogue);
  }
  fence();
}

}  // namespace
}  // namespace jaxnorm::cpu
