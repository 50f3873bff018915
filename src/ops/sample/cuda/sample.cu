// The next token of each row of logits. A row is read again in each pass, by a block or by a cluster, in which each
// warp has neighbouring columns:
//
// 1. The maximum, and its column.
// 2. The border of what is kept, if there is a top_k or a top_p.
// 3. The sum of what is kept, warp by warp.
// 4. The column at which u times the sum is passed, in the columns of the warp that says so.
//
// Filters keep the beginning of one order: by descending l, equals by ascending column. Where it ends is found by
// histograms. The first one's bins are equal steps of log2(e), those of the next are equal steps of the bits of l,
// within the bin in which the border is, until that has one l. Bins count columns and sum up by how much each e is less
// than the bin's largest. They are integers, so that sums are the same in any order.
#include <cfloat>

#include "cuda/engine/launch.cuh"
#include "cuda/engine/unaligned.cuh"
#include "ops/sample/call.h"
#include "ops/shared/cuda/logits.cuh"

namespace jaxnorm::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kMostBlocks = 8, kFewVectors = 2 * kThreads;  // of a row; and vectors that need no further block
constexpr int kFar = 4, kNear = 2;  // vectors that a thread has asked for at once: of memory; and of a cache
constexpr int kLine = 8;            // vectors in a line of memory
constexpr int kBinBits = 10, kBins = 1 << kBinBits, kThreadBins = kBins / kThreads;
constexpr float kOctaves = 40, kBinOctaves = kOctaves / kBins;  // of log2(e) in the first histogram, and in a bin of it
constexpr float kLeastOctaves = 127;                            // e of so many below the largest is 0
constexpr float kMassOfUnit = 1 << 24;  // as an integer: the mass of 2^38 units is less than 2^63
constexpr float kLog2E = 1.442695041f, kLn2 = 0.6931471806f;
constexpr unsigned kAll = 0xffffffffu;

// The place of an l among all numbers of its type.
template <typename T>
struct Key {
  static constexpr int kUnused = sizeof(T) == 4 ? 0 : std::is_same_v<T, __half> ? 13 : 16;  // bits of a float
  static constexpr uint32_t kLowest = 0x007fffffu >> kUnused;                               // that of -inf

  __device__ static uint32_t of(float l) {
    const uint32_t bits = __float_as_uint(l + 0.0f);  // zeros are equal
    return (bits ^ (bits >> 31 ? kAll : 0x80000000u)) >> kUnused;
  }

  __device__ static float value(uint32_t key) {
    key <<= kUnused;
    return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~(key | ((1u << kUnused) - 1)));
  }
};

// A number from 0 to 2^22 to the nearest integer, without a conversion, which is slow.
__device__ uint32_t rounded(float value) { return __float_as_uint(value + 0x1p23f) - 0x4b000000u; }

template <typename V>
__device__ V warp_scan(V value) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const V before = __shfl_sync(kAll, value, max(lane() - distance, 0));
    if (lane() >= distance) value += before;
  }
  return value;
}

// In all lanes.
template <typename V>
__device__ V warp_max(V value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value = max(value, __shfl_xor_sync(kAll, value, distance));
  return value;
}

// All threads of a row wait for each other.
__device__ void meet() {
  if (Cluster::blocks() > 1) {
    Cluster::arrive();
    Cluster::wait();
  } else {
    __syncthreads();
  }
}

// Columns, and their e.
struct Sums {
  uint64_t mass;
  uint32_t count;

  __device__ Sums& operator+=(const Sums& more) { return mass += more.mass, count += more.count, *this; }
  __device__ uint64_t by(bool mass_counts) const { return mass_counts ? mass : count; }
};

struct Histogram {
  uint32_t count[kBins], loss[kBins];
};

// A thread's bins of a histogram, which are neighbours.
struct Scan {
  Sums before, own[kThreadBins], total;
};

struct Found {
  uint32_t bin;
  Sums before, own;
};

// What is kept: what is greater than l, and so many of what is equal.
struct Border {
  float l;
  uint32_t equals;
};

// Of a warp's columns: the sum of e over what is greater than the border's l, and how many are equal.
struct Part {
  float sum;
  uint32_t equals;
};

struct Shared {
  Histogram own, first, later;  // of this block; and of the row
  uint64_t warp_best[kWarps], best[kMostBlocks];
  Part parts[kMostBlocks * kWarps];
  Sums scan[kWarps];
  Found found;
  uint32_t keys[2];
};

// log2(e) of a row: differences of l are exact or rounded once, and overflow only where e is 0.
struct Exponent {
  float largest, power, top, factor;

  __device__ Exponent(float largest, float temperature)
      : largest(largest),
        power(temperature >= 0x1p20f ? 0x1p-24f : 1.0f),
        top(largest * power),
        factor(fminf(kLog2E / (temperature * power), FLT_MAX)) {}

  __device__ float distance(float l) const { return fmaf(l, power, -top); }
  __device__ float log2_of(float l) const { return distance(l) * factor; }

  // The place in the first histogram, in bins.
  __device__ float place(float l) const { return fminf(log2_of(l) * (-1 / kBinOctaves), kBins - 1); }

  // By how much e is less than the largest one of its bin, which begins half a one before that to which it is rounded.
  __device__ float loss(float l) const {
    const float place = this->place(l), nearest = (place + 0x1p23f) - 0x1p23f;
    const float y = (place - nearest + 0.5f) * (kBinOctaves * kLn2);
    return y * fmaf(-y, fmaf(-1 / 6.0f, y, 0.5f), 1.0f);  // 1 - exp(-y)
  }
  __device__ static float largest_of_bin(int bin) { return exp2f((0.5f - bin) * kBinOctaves); }
};

// The columns of one row that a warp has, in vectors.
template <typename T, bool ALIGNED>
struct Slice {
  static constexpr int N = kVector<T>;
  const T* row;
  RowMask mask;
  int cols, begin, end;

  __device__ Slice(const Sample& p, const MaskLaunch& masks, int64_t index, int span, int warp)
      : row(static_cast<const T*>(p.logits.data) + index * p.cols),
        mask(RowMask::of(masks, index, p.cols)),
        cols(static_cast<int>(p.cols)) {
    cuda::hide(row);  // that each read need not find it again
    const int vectors = (cols + N - 1) / N;
    begin = min(warp * span, vectors);
    end = min(begin + span, vectors);
  }

  // What does not count is -inf.
  __device__ __noinline__ Packed<T, N> hide(Packed<T, N> packed, int col) const {
    return mask.counted<ALIGNED, N>(col, cols - col).choose(packed, kInfinity<T> | kSign<T>);
  }
  __device__ float at(int col) const {
    return col < cols && (!mask.where || mask.where[col]) ? static_cast<float>(row[col]) : -INFINITY;
  }

  // Calls f(l, col) for the vectors first, first + step, ... before `last`, of which col is the first column, and for
  // others of which all l are -inf.
  template <int AHEAD, typename F>
  __device__ void for_each(int first, int last, int step, F f) const {
#pragma unroll 1
    for (; first < last; first += AHEAD * step) {
      Packed<T, N> packed[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int vector = first + i * step, col = vector * N;
#pragma unroll
        for (uint32_t& word : packed[i].word) word = kInfinity<T> | kSign<T>;
        if (vector < last) packed[i] = ALIGNED ? load<true, N>(row + col, N) : load_unaligned<N>(row + col, cols - col);
      }
      if (mask.where || (!ALIGNED && (first + AHEAD * step) * N > cols))
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
          if (first + i * step < last) packed[i] = hide(packed[i], (first + i * step) * N);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        float l[N];
        unpack(packed[i], l);
        f(l, (first + i * step) * N);
      }
    }
  }

  // The same for all vectors, lane by lane.
  template <int AHEAD, typename F>
  __device__ void for_each(F f) const {
    for_each<AHEAD>(begin + lane(), end, kWarp, f);
  }
};

// The key of a row's largest l, and of its columns the first, of which all bits are turned; all ones if an l is NaN or
// +inf. Until here the blocks of a cluster have only arrived.
template <typename T, typename Columns>
__device__ uint64_t find_best(Shared& shared, const Columns& columns) {
  float largest = -INFINITY;
  int first = 0;
  bool is_bad = false;
  columns.template for_each<kFar>([&](const auto& l, int col) {
#pragma unroll
    for (int i = 0; i < Columns::N; ++i) {
      is_bad |= !(l[i] < INFINITY);
      if (l[i] > largest) largest = l[i], first = col + i;
    }
  });
  const uint64_t own = uint64_t{Key<T>::of(largest)} << 32 | ~static_cast<uint32_t>(first);
  const uint64_t of_warp = warp_max(is_bad ? ~uint64_t{0} : own);
  if (lane() == 0) shared.warp_best[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  if (Cluster::blocks() > 1) Cluster::wait();
  if (threadIdx.x < kWarp) {
    const uint64_t best = warp_max(lane() < kWarps ? shared.warp_best[lane()] : 0);
    if (lane() < Cluster::blocks()) *remote(shared.best + Cluster::rank(), lane()) = best;
  }
  meet();
  return warp_max(lane() < Cluster::blocks() ? shared.best[lane()] : 0);
}

// Finds the border of what top_k and top_p keep. `units`: of the largest e of a bin, in which losses are counted.
template <typename T, typename Columns>
class Search {
 public:
  __device__ Search(Shared& shared, const Columns& columns, const Exponent& exponent, float units, bool has_mass)
      : shared_(shared), columns_(columns), exponent_(exponent), units_(units), has_mass_(has_mass) {}

  __device__ Border find(uint32_t top_k, float top_p) {
    count(shared_.first,
          [&](float l) { return exponent_.log2_of(l) > -kLeastOctaves ? rounded(exponent_.place(l)) : kBins; });
    Border border{-INFINITY, 0};
    uint64_t mass = 0;  // of what is kept; 0: of all
#pragma unroll 1
    for (const bool by_mass : {false, true}) {
      if (by_mass ? !has_mass_ : top_k == 0) continue;
      const Scan scan = scan_of(shared_.first, exponent_.largest_of_bin);
      if (mass == 0) mass = scan.total.mass;
      if (!by_mass && top_k >= scan.total.count) continue;
      const double of_mass = ceil(static_cast<double>(top_p) * static_cast<double>(mass));
      const uint64_t target = by_mass ? min(max(static_cast<uint64_t>(of_mass), uint64_t{1}), mass) : top_k;
      const Border next = find(locate(scan, by_mass, target), by_mass, target, mass);
      border = {next.l, next.l == border.l ? min(next.equals, border.equals) : next.equals};
    }
    return border;
  }

 private:
  // The border, in this bin of the first histogram, at which the target is reached, and the mass of what is kept.
  __device__ Border find(const Found& first, bool by_mass, uint64_t target, uint64_t& mass) {
    const float largest = exponent_.largest_of_bin(first.bin);
    if (threadIdx.x < 2 * kWarp) {
      const uint32_t key = greatest_key(first.bin + 1 - threadIdx.x / kWarp);
      if (lane() == 0) shared_.keys[threadIdx.x / kWarp] = key;
    }
    __syncthreads();
    uint32_t low = shared_.keys[0] + 1, high = shared_.keys[1];
    Sums before = first.before, own = first.own;
    const auto is_whole = [&] { return by_mass ? own.count == 1 : before.count + own.count == target; };
    while (low < high && !is_whole()) {
      const int shift = max(0, 32 - kBinBits - __clz(high - low));
      const float least = Key<T>::value(low), most = Key<T>::value(high);
      count(shared_.later, [&](float l) { return l >= least && l <= most ? (high - Key<T>::of(l)) >> shift : kBins; });
      const Found found =
          locate(scan_of(shared_.later, [&](int) { return largest; }), by_mass, target - before.by(by_mass));
      before += found.before, own = found.own;
      high -= found.bin << shift;
      low = max(low, high - ((1u << shift) - 1));
    }
    mass = before.mass + own.mass;
    if (is_whole()) return {Key<T>::value(low), UINT_MAX};
    const double of_each = static_cast<double>(own.mass) / static_cast<double>(own.count);
    auto equals = static_cast<uint32_t>(target - before.count);
    if (by_mass) {
      const double reached = ceil(static_cast<double>(target - before.mass) / of_each);
      equals = min(max(static_cast<uint32_t>(reached), 1u), own.count);
    }
    mass = before.mass + static_cast<uint64_t>(of_each * static_cast<double>(equals));
    return {Key<T>::value(low), equals};
  }

  // The greatest key of what is in this bin of the first histogram or behind it, found by all lanes of a warp.
  __device__ uint32_t greatest_key(uint32_t bin) const {
    uint32_t low = Key<T>::kLowest, high = Key<T>::of(exponent_.largest) + 1;  // one of them; and one that is none
    while (high - low > 1) {
      const uint32_t step = (high - low + kWarp) / (kWarp + 1), at = low + (lane() + 1) * step;
      const bool is_one = at < high && rounded(exponent_.place(Key<T>::value(at))) >= bin;
      low += __popc(__ballot_sync(kAll, is_one)) * step;
      high = min(high, low + step);
    }
    return low;
  }

  // The row's histogram, with bin_of(l) as bins; kBins is none.
  template <typename F>
  __device__ void count(Histogram& all, F bin_of) {
    Histogram& own = shared_.own;
#pragma unroll
    for (int i = 0; i < kThreadBins; ++i)
      own.count[i * kThreads + threadIdx.x] = own.loss[i * kThreads + threadIdx.x] = 0;
    __syncthreads();
    columns_.template for_each<kNear>([&](const auto& l, int) {
      uint32_t bin[Columns::N], least = kBins;
#pragma unroll
      for (int i = 0; i < Columns::N; ++i) {
        bin[i] = bin_of(l[i]);
        least = min(least, bin[i]);
        if (bin[i] < kBins) atomicAdd(own.count + bin[i], 1u);
      }
      if (!has_mass_ || least == kBins) return;
#pragma unroll
      for (int i = 0; i < Columns::N; ++i) {
        // A loss of 0 in some bin takes less time than a branch.
        const bool counts = bin[i] < kBins;
        atomicAdd(own.loss + (counts ? bin[i] : lane()), rounded(exponent_.loss(l[i]) * (counts ? units_ : 0.0f)));
      }
    });
    meet();
    // Each block adds up some of the words, for all. There are always as many loads and stores, so that they are on
    // their way at once.
    const int blocks = Cluster::blocks(), words = (has_mass_ ? 2 : 1) * kBins / blocks;
    for (int i = threadIdx.x; i < words; i += kThreads) {
      const int word = Cluster::rank() * words + i;
      uint32_t parts[kMostBlocks], sum = 0;
#pragma unroll
      for (int k = 0; k < kMostBlocks; ++k) parts[k] = remote(own.count, min(k, blocks - 1))[word];
#pragma unroll
      for (int k = 0; k < kMostBlocks; ++k) sum += k < blocks ? parts[k] : 0;
#pragma unroll
      for (int k = 0; k < kMostBlocks; ++k) remote(all.count, min(k, blocks - 1))[word] = sum;
    }
    meet();
  }

  // `largest(bin)`: the largest e of a bin.
  template <typename F>
  __device__ Scan scan_of(const Histogram& histogram, F largest) {
    Scan scan;
    Sums sums{};
#pragma unroll
    for (int i = 0; i < kThreadBins; ++i) {
      const int bin = threadIdx.x * kThreadBins + i;
      const uint32_t count = histogram.count[bin];
      const double units = static_cast<double>(count) * units_ - (has_mass_ ? histogram.loss[bin] : 0);
      scan.own[i] = {static_cast<uint64_t>(units * (largest(bin) * kMassOfUnit)), count};
      sums += scan.own[i];
    }
    const Sums until = scan_warp(sums);
    const int warp = threadIdx.x / kWarp;
    if (lane() == kWarp - 1) shared_.scan[warp] = until;
    __syncthreads();
    const Sums of_warp = lane() < kWarps ? shared_.scan[lane()] : Sums{}, warps = scan_warp(of_warp);
    scan.before = {until.mass - sums.mass + __shfl_sync(kAll, warps.mass - of_warp.mass, warp),
                   until.count - sums.count + __shfl_sync(kAll, warps.count - of_warp.count, warp)};
    scan.total = {__shfl_sync(kAll, warps.mass, kWarp - 1), __shfl_sync(kAll, warps.count, kWarp - 1)};
    return scan;
  }

  __device__ static Sums scan_warp(const Sums& sums) { return {warp_scan(sums.mass), warp_scan(sums.count)}; }

  // The bin with which the target is reached.
  __device__ Found locate(const Scan& scan, bool by_mass, uint64_t target) {
    __syncthreads();  // all have the one found last
    Sums before = scan.before;
#pragma unroll
    for (int i = 0; i < kThreadBins; ++i) {
      const Sums& own = scan.own[i];
      if (before.by(by_mass) < target && target - before.by(by_mass) <= own.by(by_mass))
        shared_.found = {threadIdx.x * kThreadBins + i, before, own};
      before += own;
    }
    __syncthreads();
    return shared_.found;
  }

  Shared& shared_;
  const Columns& columns_;
  const Exponent& exponent_;
  const float units_;
  const bool has_mass_;
};

// A column, and the sum of e over all that are kept; -1 in the warps of a row that do not have it.
struct Drawn {
  int col = -1;
  float sum = 0;
};

// Draws a column of what is kept, of which log2(e) is no less than `least`.
template <typename Columns>
class Draw {
 public:
  __device__ Draw(const Columns& columns, const Exponent& exponent, const Border& border, float least)
      : columns_(columns), exponent_(exponent), border_(border), least_(least), equals_(border.equals) {}

  __device__ Drawn draw(Shared& shared, float uniform) {
    const Part sums = part_of(columns_.begin + lane(), columns_.end, kWarp);
    const Part of_warp{group_sum<kWarp>(sums.sum), group_sum<kWarp>(sums.equals)};
    const int own = Cluster::rank() * kWarps + threadIdx.x / kWarp;
    if (lane() < Cluster::blocks()) *remote(shared.parts + own, lane()) = of_warp;
    meet();

    // Every warp finds the one that has the column.
    constexpr int kOfLane = kMostBlocks * kWarps / kWarp;
    const auto part_at = [&](int i) { return i < Cluster::blocks() * kWarps ? shared.parts[i] : Part{}; };
    Part of_lane{};
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) add(of_lane, part_at(lane() * kOfLane + i));
    const float all = __shfl_sync(kAll, warp_scan(kept(of_lane, warp_scan(of_lane.equals))), kWarp - 1);
    rest_ = uniform * all;
    const int parts = select(of_lane) * kOfLane;
    if (parts + select(lane() < kOfLane ? part_at(parts + lane()) : Part{}) != own) return {};

    // Of its vectors each lane has some, then of these each one's columns.
    int vectors = (columns_.end - columns_.begin + kWarp - 1) / kWarp;
    const int begin = columns_.begin + lane() * vectors;
    int col = columns_.begin + select(part_of(begin, min(begin + vectors, columns_.end), 1)) * vectors;
    col *= Columns::N;
    for (int cols = vectors * Columns::N; cols > 1;) {
      const int step = (cols + kWarp - 1) / kWarp;
      Part part{};
      for (int i = lane() * step; i < min((lane() + 1) * step, cols); ++i) add(part, columns_.at(col + i));
      col += select(part) * step;
      cols = step;
    }
    return {col, all};
  }

 private:
  // 0 where l is not taken: chosen before, since a branch for each e would take longer.
  __device__ float e_of(float l, bool is_taken) const {
    const float log2_e = exponent_.log2_of(l);
    return exp2_estimate(is_taken && log2_e >= least_ ? log2_e : -INFINITY);
  }

  __device__ static void add(Part& part, const Part& more) { part.sum += more.sum, part.equals += more.equals; }
  __device__ void add(Part& part, float l) const {
    part.sum += e_of(l, l > border_.l);
    part.equals += l == border_.l;
  }

  __device__ Part part_of(int first, int last, int step) const {
    Part part{};
    columns_.template for_each<kNear>(first, last, step, [&](const auto& l, int) {
#pragma unroll
      for (int i = 0; i < Columns::N; ++i) add(part, l[i]);
    });
    return part;
  }

  // How many of equals are left after so many.
  __device__ uint32_t left_of(uint32_t equals) const { return equals_ - min(equals_, equals); }

  // The sum of what is kept of a part, with which there are so many equals.
  __device__ float kept(const Part& part, uint32_t equals_until) const {
    return part.sum + static_cast<float>(min(part.equals, left_of(equals_until - part.equals))) * e_of(border_.l, true);
  }

  // The first lane with whose part the rest is passed, or else the last that keeps any of it. From then on rest and
  // equals are what is left behind the parts before.
  __device__ int select(const Part& part) {
    const uint32_t equals = warp_scan(part.equals);
    const float sum = kept(part, equals), until = warp_scan(sum);
    const unsigned passing = __ballot_sync(kAll, sum > 0 && until > rest_), keeping = __ballot_sync(kAll, sum > 0);
    const int selected = passing ? __ffs(passing) - 1 : kWarp - 1 - __clz(keeping);
    rest_ = __shfl_sync(kAll, rest_ - (until - sum), selected);
    equals_ = __shfl_sync(kAll, left_of(equals - part.equals), selected);
    return selected;
  }

  const Columns& columns_;
  const Exponent& exponent_;
  const Border border_;
  const float least_;
  float rest_ = 0;
  uint32_t equals_;
};

template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(kThreads, 2) sample_kernel(Sample p, MaskLaunch masks, int span, float units) {
  __shared__ Shared shared;
  if (Cluster::blocks() > 1) Cluster::arrive();
  const int64_t index = blockIdx.x / Cluster::blocks();
  const float uniform = __ldg(p.uniform + index), temperature = __ldg(p.temperature + index);
  const int top_k = p.top_k ? __ldg(p.top_k + index) : 0;
  const float top_p = p.top_p ? __ldg(p.top_p + index) : 1, min_p = p.min_p ? __ldg(p.min_p + index) : 0;

  const int warp = Cluster::rank() * kWarps + threadIdx.x / kWarp;
  using Columns = Slice<T, ALIGNED>;
  const Columns columns(p, masks, index, span, warp);
  const uint64_t best = find_best<T>(shared, columns);
  const float largest = Key<T>::value(static_cast<uint32_t>(best >> 32));
  const bool is_good = largest > -INFINITY && temperature >= 0 && temperature < INFINITY && top_k >= -1 &&
                       top_p == top_p && min_p >= 0 && uniform >= 0 && uniform < 1;
  if (!is_good || temperature == 0 || top_k == 1 || top_p <= 0 || min_p > 1) {
    if (warp == 0 && lane() == 0) {
      p.ids[index] = is_good ? static_cast<int>(~static_cast<uint32_t>(best)) : -1;
      p.log_probs[index] = is_good ? 0.0f : NAN;
    }
    return;
  }
  const Exponent exponent(largest, temperature);
  Border border{-INFINITY, 0};
  const bool has_top_k = top_k > 0 && top_k < p.cols, has_top_p = top_p < 1;
  if (has_top_k || has_top_p)
    border = Search<T, Columns>(shared, columns, exponent, units, has_top_p).find(has_top_k ? top_k : 0, top_p);
  const Drawn drawn = Draw<Columns>(columns, exponent, border, log2f(min_p)).draw(shared, uniform);
  if (drawn.col < 0 || lane() > 0) return;
  p.ids[index] = drawn.col;
  p.log_probs[index] = exponent.distance(columns.at(drawn.col)) / (temperature * exponent.power) - logf(drawn.sum);
}

template <typename T>
cudaError_t launch(const Sample& p, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const bool is_aligned = p.cols % N == 0 && are_aligned<N>(p.logits) && is_aligned_for<N>(p.mask);
  const int64_t vectors = ceil_div(p.cols, N);
  int blocks = 1;
  while (blocks < kMostBlocks && blocks * kFewVectors < vectors && current_device().has_clusters()) blocks *= 2;
  // Of whole lines of memory.
  const int span = static_cast<int>(ceil_div(ceil_div(vectors, int64_t{blocks} * kWarps), kLine) * kLine);
  // A sum of losses, each less than 1 / 32 of the largest e, is less than 2^32.
  const auto units = static_cast<float>(std::min<int64_t>(1 << 22, (int64_t{1} << 37) / p.cols));
  const Plan plan{kThreads, kStreamed, 1, blocks};
  return launch_groups(is_aligned ? sample_kernel<T, true> : sample_kernel<T, false>, plan, p.rows, 0, stream, p,
                       MaskLaunch(p.mask), span, units);
}

}  // namespace

Outcome run(const Sample& p, Stream stream) {
  if (p.rows == 0) return {cudaSuccess};
  if (p.logits.dtype == Dtype::f32) return {launch<float>(p, stream)};
  return {p.logits.dtype == Dtype::f16 ? launch<__half>(p, stream) : launch<__nv_bfloat16>(p, stream)};
}

}  // namespace jaxnorm::cuda
