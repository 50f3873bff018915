// The draw of the next token, a row at a time, and its launch.
//
// What is kept of a row ends at a border in the order of its columns. It is found without a sort: by the digits of the
// logits' bits, the first ones first, with the columns that share those so far.
#include "cpu/engine/columns.h"
#include "cpu/engine/isa.h"
#include "cpu/engine/parallel.h"
#include "cpu/engine/types.h"
#include "ops/sample/call.h"
#include "ops/shared/cpu/exp.h"
#include "ops/shared/cpu/mask.h"

namespace jaxnorm::cpu {

// Columns and what they sum up to.
struct SampleBin {
  int64_t count;
  double sum;
};

constexpr int64_t kMostBins = 1 << 11, kMostLanes = 16;

// What a task keeps of one row; the first two have room for a whole vector at their end.
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

// The last column that is kept.
struct Border {
  float logit;
  int64_t column;

  bool is_before(Border other) const { return logit > other.logit || (logit == other.logit && column < other.column); }
};

struct Prefix {
  Border border;
  double sum;
};

// Ascends with the logit, which is neither NaN nor -0.
uint32_t key_of(float logit) {
  uint32_t bits;
  memcpy(&bits, &logit, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The shortest prefix of at least so many columns and such a sum of e; all of the row if none is.
Prefix prefix_of(SampleRoom room, int64_t cols, int64_t count, double sum) {
  SampleBin before = {0, 0};
  const auto reaches = [&](SampleBin more) {
    return before.count + more.count >= count && before.sum + more.sum >= sum;
  };
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
      if (bin.count > 0 && reaches(bin)) break;
      before.count += bin.count, before.sum += bin.sum;
    }
    if (found < 0) return {{-kInfinity, cols}, before.sum};
    int64_t kept = 0;
    for (int64_t i = 0; i < left; ++i) {
      const int32_t column = room.columns[i];
      room.columns[kept] = column;
      kept += bin_of(column) == found;
    }
    left = kept;
  }
  // These are equal. If their sum was rounded up before, all are kept.
  const double each = room.e[room.columns[0]];
  int64_t last = 0;
  for (; last < left - 1 && !reaches({last + 1, (last + 1) * each}); ++last) {
  }
  return {{room.logits[room.columns[0]], room.columns[last]}, before.sum + (last + 1) * each};
}

// The row in f32, with -inf for what does not count and -0 as 0, up to a whole vector. The largest, or NaN if there is
// one.
template <class X>
float read(const Sample& p, const X* x, int64_t row, float* logits, int64_t padded) {
  const RowMask mask = RowMask::of(p.mask, row, p.cols);
  Bits is_nan = {};
  for_each_vector(p.cols, [&](int64_t column, auto extent) {
    const Vec v = mask(load(x + column, extent), column, extent, -kInfinity) + 0.f;
    is_nan |= (Bits)(v != v);
    store(logits + column, v, extent);
  });
  for (int64_t column = p.cols; column < padded; ++column) logits[column] = -kInfinity;
  float top;
  largest<1>(padded, [&](int, int64_t column, auto extent) { return load(logits + column, extent); }, &top);
  for (int lane = 0; lane < W; ++lane)
    if (is_nan[lane]) top = __builtin_nanf("");
  return top;
}

// Sets e to 0 in columns [begin, end) where it is less than least, or is_kept(logits) is not true.
template <class IsKept>
void keep(SampleRoom room, int64_t begin, int64_t end, float least, IsKept is_kept) {
  for_each_vector(end - begin, [&](int64_t i, auto extent) {
    const Vec e = load(room.e + begin + i, extent), logits = load(room.logits + begin + i, extent);
    store(room.e + begin + i, is_kept(logits) ? (e >= least ? e : Vec{}) : Vec{}, extent);
  });
}

double sum_of(const float* e, int64_t count) {
  return sum<1, 1>(count, [&](int, int64_t i, auto extent, Vec* sums) { sums[0] += load(e + i, extent); }).values[0][0];
}

template <class X>
void draw_row(const Sample& p, const X* x, int64_t row, SampleRoom room) {
  constexpr int64_t kBlock = 1 << 10;
  const int64_t cols = p.cols, padded = (cols + W - 1) / W * W;
  const float temperature = p.temperature[row], uniform = p.uniform[row];
  const int64_t top_k = p.top_k ? p.top_k[row] : 0;
  const float top_p = p.top_p ? p.top_p[row] : 1, min_p = p.min_p ? p.min_p[row] : 0;
  p.ids[row] = -1, p.log_probs[row] = __builtin_nanf("");
  const float top = read(p, x, row, room.logits, padded);
  if (!(top > -kInfinity && top < kInfinity && temperature >= 0 && temperature < kInfinity && uniform >= 0 &&
        uniform < 1 && top_k >= -1 && top_p == top_p && min_p >= 0))
    return;

  int64_t first = 0;
  while (room.logits[first] != top) ++first;
  if (temperature == 0) {
    p.ids[row] = static_cast<int32_t>(first), p.log_probs[row] = 0;
    return;
  }
  for (int64_t column = 0; column < padded; column += W)
    store(room.e + column, exp((load(room.logits + column, Whole{}) - top) / temperature), Whole{});

  Prefix kept = {{-kInfinity, cols}, 0};
  if (top_k > 0 && top_k < cols) kept = prefix_of(room, cols, top_k, 0);
  if (top_p <= 0 || min_p > 1) {
    kept.border = {top, first};
  } else if (top_p < 1) {
    const double whole = kept.border.column < cols ? kept.sum : sum_of(room.e, padded);
    const Border border = prefix_of(room, cols, 1, top_p * whole).border;
    if (border.is_before(kept.border)) kept.border = border;
  }
  const Border border = kept.border;
  const float least = min_p > 1 ? 0 : min_p;
  if (border.column < cols || least > 0) {
    const int64_t end = border.column < cols ? border.column + 1 : cols;
    keep(room, 0, end, least, [&](Vec logits) { return logits >= border.logit; });
    keep(room, end, cols, least, [&](Vec logits) { return logits > border.logit; });
  }

  double total = 0, before = 0;
  for (int64_t block = 0; block < cols; block += kBlock)
    total += sum_of(room.e + block, cols - block < kBlock ? cols - block : kBlock);
  // In the same order: the last block with anything in it reaches the total, which is more than this.
  const double least_sum = uniform * total;
  int64_t begin = 0, id = first;
  for (double of_block; begin < cols; begin += kBlock, before += of_block) {
    of_block = sum_of(room.e + begin, cols - begin < kBlock ? cols - begin : kBlock);
    if (before + of_block > least_sum) break;
  }
  for (int64_t column = begin; column < cols && column < begin + kBlock && before <= least_sum; ++column) {
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
    const auto logits = room_for(p.cols + kMostLanes), e = room_for(p.cols + kMostLanes);
    const std::unique_ptr<int32_t[]> columns(new int32_t[p.cols]);
    const std::unique_ptr<SampleBin[]> bins(new SampleBin[kMostBins]);
    kernels<SampleKernels>().draw(p, begin, end, {logits.get(), e.get(), columns.get(), bins.get()});
  });
}
#endif

}  // namespace jaxnorm::cpu
