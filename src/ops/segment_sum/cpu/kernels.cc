// Sums of segments, by segments and columns, and their launch.
#include <cstring>

#include "engine/cpu/columns.h"
#include "engine/cpu/launch.h"
#include "engine/cpu/vector.h"
#include "ops/segment_sum/call.h"

namespace jaxnorm::cpu {

// Positions in the order of segments: those of segment v are positions[starts[v]] to before positions[starts[v + 1]].
struct Segments {
  const int32_t* starts;
  const int32_t* positions;
};

// How many columns one task has at most; so many additions have a sum of their own.
constexpr int64_t kSumColumns = 1 << 10, kSumRows = 64;

struct SegmentSumKernels {
  static const SegmentSumKernels baseline, avx2, avx512;

  // Of these columns of segments [begin, end).
  void (*sum)(const SegmentSum& p, Segments segments, int64_t begin, int64_t end, int64_t first_col, int64_t cols);
};

namespace {

// K vectors of columns of one segment, whose positions are [first, last).
template <int K, class X, class Y, class Extent>
[[gnu::always_inline]] inline void sum_columns(const X* data, int64_t stride, const int32_t* positions, int64_t first,
                                               int64_t last, Y* sums, bool is_added, Extent extent) {
  Vec total[K] = {};
  for (int64_t at = first; at < last;) {
    const int64_t stop = last - at < kSumRows ? last : at + kSumRows;
    Vec part[K] = {};
    for (; at < stop; ++at) {
      const X* const row = data + positions[at] * stride;
      for (int k = 0; k < K; ++k) part[k] += load(row + k * W, extent);
    }
    for (int k = 0; k < K; ++k) total[k] += part[k];
  }
  for (int k = 0; k < K; ++k) store(sums + k * W, is_added ? load(sums + k * W, extent) + total[k] : total[k], extent);
}

void sum(const SegmentSum& p, Segments segments, int64_t begin, int64_t end, int64_t first_col, int64_t cols) {
  constexpr int K = 8;
  with_type(p.data.dtype, [&](auto x_type) {
    using X = decltype(x_type);
    with_type(p.sums.dtype, [&](auto y_type) {
      using Y = decltype(y_type);
      const X* const data = static_cast<const X*>(p.data.data) + first_col;
      for (int64_t segment = begin; segment < end; ++segment) {
        const int64_t first = segments.starts[segment], last = segments.starts[segment + 1];
        if (p.is_added && first == last) continue;
        Y* const sums = static_cast<Y*>(p.sums.data) + segment * p.cols + first_col;
        int64_t col = 0;
        for (; col + K * W <= cols; col += K * W)
          sum_columns<K>(data + col, p.cols, segments.positions, first, last, sums + col, p.is_added, Whole{});
        for_each_vector(cols - col, [&](int64_t i, auto extent) {
          sum_columns<1>(data + col + i, p.cols, segments.positions, first, last, sums + col + i, p.is_added, extent);
        });
      }
    });
  });
}

}  // namespace

const SegmentSumKernels SegmentSumKernels::JAXNORM_ISA = {cpu::sum};

#ifdef JAXNORM_ONCE
void run(const SegmentSum& p, const ParallelFor& parallel_for) {
  const int64_t segments = p.segments;
  if (segments * p.cols == 0) return;
  if (!p.is_added || p.onto.data != p.sums.data) expect_writes(p.sums, segments * p.cols);
  if (p.is_added && p.onto.data != p.sums.data)
    std::memcpy(p.sums.data, p.onto.data, segments * p.cols * size_of(p.sums.dtype));
  // A counting sort: first how many positions each segment has, then where its own begin.
  const std::unique_ptr<int32_t[]> starts(new int32_t[segments + 2]()), positions(new int32_t[p.positions + 1]);
  const auto counts = [&](int64_t i) { return p.ids[i] >= 0 && p.ids[i] < segments; };
  for (int64_t i = 0; i < p.positions; ++i)
    if (counts(i)) ++starts[p.ids[i] + 2];
  for (int64_t v = 0; v < segments; ++v) starts[v + 2] += starts[v + 1];
  for (int64_t i = 0; i < p.positions; ++i)
    if (counts(i)) positions[starts[p.ids[i] + 1]++] = p.order ? p.order[i] : static_cast<int32_t>(i);

  // Tasks of as many positions and segments together, so far as no segment is divided but by columns.
  const int64_t items = segments + starts[segments], step = ceil_div(kTaskElements, std::min(p.cols, kSumColumns));
  const auto segment_at = [&](int64_t item) {
    int64_t low = 0, high = segments;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (starts[middle] + middle < item) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  const int64_t parts = ceil_div(p.cols, kSumColumns);
  parallel_for(ceil_div(items, step) * parts, [&](int64_t task) {
    const int64_t first = task / parts * step, col = task % parts * kSumColumns;
    kernels<SegmentSumKernels>().sum(p, {starts.get(), positions.get()}, segment_at(first),
                                     first + step >= items ? segments : segment_at(first + step), col,
                                     std::min(kSumColumns, p.cols - col));
  });
}
#endif

}  // namespace jaxnorm::cpu
