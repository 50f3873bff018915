// The draw of the next token, a row at a time, and its launch.
//
// What is kept of a row ends at a border in the order of its columns. It is found without a sort: by the digits of the
// logits' bits, the first ones first, with the columns that share those so far.
#include "engine/cpu/columns.h"
#include "engine/cpu/launch.h"
#include "engine/cpu/vector.h"
#include "ops/sample/call.h"
#include "ops/shared/cpu/functions.h"
#include "ops/shared/cpu/logits.h"

namespace jaxnorm::cpu {

// Columns and what they sum up to.
struct SampleBin {
  int64_t count;
  double sum;
};

constexpr int64_t kMostBins = 1 << 11;

// What a task keeps of one row.
struct SampleRoom {
  float *logits, *e;
  int32_t* columns;
  SampleBin* bins;
};

struct SampleKernels {
  static const SampleKernels baseline, avx2, avx512;

  void (*draw)(const Sample& p, int64_t begin, int64_t end, SampleRoom room);
};

namespace {

constexpr float kInfinity = __builtin_inff();

// The last column that is kept, and what e sums up to as far as there.
struct Border {
  float logit;
  int32_t column;
  double sum;
};

// Ascends with the logit, which is neither NaN nor -0.
uint32_t key_of(float logit) {
  uint32_t bits;
  memcpy(&bits, &logit, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// That of the fewest columns which are so many, and have such a sum of e; of all of the row if none are.
Border border_of(SampleRoom room, int32_t cols, int64_t count, double sum) {
  SampleBin before = {0, 0};
  const auto reaches = [&](int64_t more, double e) { return before.count + more >= count && before.sum + e >= sum; };
  const int most_bits = cols < kMostBins ? 8 : 11;
  int64_t left = cols;
  for (int32_t i = 0; i < cols; ++i) room.columns[i] = i;
  for (int shift = 32; shift > 0;) {
    const int bits = shift < most_bits ? shift : most_bits;
    shift -= bits;
    const auto bin_of = [&](int32_t column) { return key_of(room.logits[column]) >> shift & ((1 << bits) - 1); };
    memset(room.bins, 0, sizeof(SampleBin) << bits);
    for (int64_t i = 0; i < left; ++i) {
      SampleBin& bin = room.bins[bin_of(room.columns[i])];
      ++bin.count, bin.sum += room.e[room.columns[i]];
    }
    int64_t found = (1 << bits) - 1;
    for (; found >= 0; --found) {
      const SampleBin bin = room.bins[found];
      if (bin.count > 0 && reaches(bin.count, bin.sum)) break;
      before.count += bin.count, before.sum += bin.sum;
    }
    if (found < 0) return {-kInfinity, cols, before.sum};
    const int64_t last = left;
    left = 0;
    for (int64_t i = 0; i < last; ++i) {
      const int32_t column = room.columns[i];
      room.columns[left] = column;
      left += bin_of(column) == found;
    }
  }
  // These are equal. If their sum was rounded up before, all are kept.
  const double each = room.e[room.columns[0]];
  int64_t more = 1;
  while (more < left && !reaches(more, more * each)) ++more;
  return {room.logits[room.columns[0]], room.columns[more - 1], before.sum + more * each};
}

// The row in f32, with -inf for what does not count and 0 for -0. The largest, or NaN if there is one.
template <class X>
float read(const Sample& p, const X* x, int64_t row, float* logits) {
  const RowMask mask = RowMask::of(p.mask, row, p.cols);
  Bits is_nan = {};
  for_each_vector(p.cols, [&](int64_t column, auto extent) {
    const Vec v = mask(load(x + column, extent), column, extent, -kInfinity) + 0.f;
    store(logits + column, v, extent);
    is_nan |= (Bits)(v != v);
  });
  float top;
  largest<1>(p.cols / W * W, [&](int, int64_t i, auto extent) { return load(logits + i, extent); }, &top);
  for (int64_t column = p.cols / W * W; column < p.cols; ++column) top = logits[column] > top ? logits[column] : top;
  for (int lane = 0; lane < W; ++lane)
    if (is_nan[lane]) top = __builtin_nanf("");
  return top;
}

template <class X>
void draw_row(const Sample& p, const X* x, int64_t row, SampleRoom room) {
  constexpr int64_t kBlock = 1 << 10;
  const int32_t cols = static_cast<int32_t>(p.cols);
  const float temperature = p.temperature[row], uniform = p.uniform[row];
  const int64_t top_k = p.top_k ? p.top_k[row] : 0;
  const float top_p = p.top_p ? p.top_p[row] : 1, min_p = p.min_p ? p.min_p[row] : 0;
  p.ids[row] = -1, p.log_probs[row] = __builtin_nanf("");
  const float top = read(p, x, row, room.logits);
  if (!(top > -kInfinity && top < kInfinity && temperature >= 0 && temperature < kInfinity && uniform >= 0 &&
        uniform < 1 && top_k >= -1 && top_p == top_p && min_p >= 0))
    return;

  int32_t first = 0;
  while (room.logits[first] != top) ++first;
  if (temperature == 0) {
    p.ids[row] = first, p.log_probs[row] = 0;
    return;
  }
  for_each_vector(cols, [&](int64_t column, auto extent) {
    store(room.e + column, exp((load(room.logits + column, extent) - top) / temperature), extent);
  });
  // By blocks, always in the same order.
  const auto sum_of_block = [&](int64_t begin) {
    return sum<1, 1>(cols - begin < kBlock ? cols - begin : kBlock,
                     [&](int, int64_t i, auto extent, Vec* sums) { sums[0] += load(room.e + begin + i, extent); })
        .values[0][0];
  };
  const auto sum_of_all = [&] {
    double total = 0;
    for (int64_t begin = 0; begin < cols; begin += kBlock) total += sum_of_block(begin);
    return total;
  };

  Border kept = {-kInfinity, cols, 0};
  if (top_k > 0 && top_k < cols) kept = border_of(room, cols, top_k, 0);
  if (top_p <= 0 || min_p > 1) {
    kept = {top, first, 1};
  } else if (top_p < 1) {
    const Border b = border_of(room, cols, 1, top_p * (kept.column < cols ? kept.sum : sum_of_all()));
    if (b.logit > kept.logit || (b.logit == kept.logit && b.column < kept.column)) kept = b;
  }
  if (kept.column < cols || min_p > 0) {
    const float least = min_p > 1 ? 0 : min_p;
    for (int32_t i = 0; i < cols; ++i) {
      const bool is_kept = (room.logits[i] > kept.logit) | ((room.logits[i] == kept.logit) & (i <= kept.column));
      room.e[i] = is_kept & (room.e[i] >= least) ? room.e[i] : 0;
    }
  }

  const double total = sum_of_all(), passed = uniform * total;
  double before = 0;
  int64_t column = 0, id = first;
  for (double sum; column < cols && before + (sum = sum_of_block(column)) <= passed; column += kBlock) before += sum;
  for (const int64_t end = column + kBlock; column < cols && column < end && before <= passed; ++column) {
    if (room.e[column] > 0) id = column;
    before += room.e[column];
  }
  p.ids[row] = static_cast<int32_t>(id);
  p.log_probs[row] = (room.logits[id] - top) / temperature - static_cast<float>(__builtin_log(total));
}

void draw(const Sample& p, int64_t begin, int64_t end, SampleRoom room) {
  with_type(p.logits.dtype, [&](auto x_type) {
    const auto* const x = static_cast<const decltype(x_type)*>(p.logits.data);
    for (int64_t row = begin; row < end; ++row) draw_row(p, x + row * p.cols, row, room);
  });
}

}  // namespace

const SampleKernels SampleKernels::JAXNORM_ISA = {cpu::draw};

#ifdef JAXNORM_ONCE
void run(const Sample& p, const ParallelFor& parallel_for) {
  for_each_rows(for_tasks_that_allocate(parallel_for), p.rows, p.cols, [&](int64_t begin, int64_t end) {
    const auto logits = room_for(p.cols), e = room_for(p.cols);
    const std::unique_ptr<int32_t[]> columns(new int32_t[p.cols]);
    const std::unique_ptr<SampleBin[]> bins(new SampleBin[kMostBins]);
    kernels<SampleKernels>().draw(p, begin, end, {logits.get(), e.get(), columns.get(), bins.get()});
  });
}
#endif

}  // namespace jaxnorm::cpu
