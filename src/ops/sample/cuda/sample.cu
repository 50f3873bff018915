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
    const uint32_t bits = __float_as_uint(l);
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
  uint64_t count, mass;

  __device__ Sums& operator+=(const Sums& more) { return count += more.count, mass += more.mass, *this; }
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
    const int vectors = (cols + N - 1) / N;
    begin = min(warp * span, vectors);
    end = min(begin + span, vectors);
  }

  __device__ __noinline__ Packed<T, N> hide(Packed<T, N> packed, int col, int remaining) const {
    return mask.counted<ALIGNED, N>(col, remaining).choose(packed, kInfinity<T> | kSign<T>);
  }

  // A vector, in which what does not count is -inf.
  __device__ Packed<T, N> read(int vector) const {
    const int col = vector * N, remaining = cols - col;
    Packed<T, N> packed;
#pragma unroll
    for (uint32_t& word : packed.word) word = kInfinity<T> | kSign<T>;
    if (vector >= end) return packed;
    packed = ALIGNED ? load<true, N>(row + col, N) : load_unaligned<N>(row + col, remaining);
    return mask.where || (!ALIGNED && remaining < N) ? hide(packed, col, remaining) : packed;
  }

  // Calls f(l, col) with N neighbouring columns, by all lanes equally often, until it is false.
  template <int AHEAD, typename F>
  __device__ void for_each(F f) const {
#pragma unroll 1
    for (int first = begin; first < end; first += AHEAD * kWarp) {
      Packed<T, N> packed[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) packed[i] = read(first + i * kWarp + lane());
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        float l[N];
        unpack_plus_zero(packed[i], l);
        if (!f(l, (first + i * kWarp + lane()) * N)) return;
      }
    }
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
    return true;
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
    count(shared_.first, [&](float l, auto add) {
      if (exponent_.log2_of(l) > -kLeastOctaves) add(rounded(exponent_.place(l)));
    });
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
      count(shared_.later, [&](float l, auto add) {
        if (l >= least && l <= most) add((high - Key<T>::of(l)) >> shift);
      });
      const Found found =
          locate(scan_of(shared_.later, [&](int) { return largest; }), by_mass, target - before.by(by_mass));
      before += found.before, own = found.own;
      high -= found.bin << shift;
      low = max(low, high - ((1u << shift) - 1));
    }
    mass = before.mass + own.mass;
    if (is_whole()) return {Key<T>::value(low), UINT_MAX};
    const double of_each = static_cast<double>(own.mass) / static_cast<double>(own.count);
    uint64_t equals = target - before.count;
    if (by_mass) {
      const double reached = ceil(static_cast<double>(target - before.mass) / of_each);
      equals = min(max(static_cast<uint64_t>(reached), uint64_t{1}), own.count);
    }
    mass = before.mass + static_cast<uint64_t>(of_each * static_cast<double>(equals));
    return {Key<T>::value(low), static_cast<uint32_t>(equals)};
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

  // The row's histogram of what f(l, add) adds by add(bin).
  template <typename F>
  __device__ void count(Histogram& all, F f) {
    Histogram& own = shared_.own;
    for (int i = threadIdx.x; i < kBins; i += kThreads) own.count[i] = own.loss[i] = 0;
    __syncthreads();
    columns_.template for_each<kNear>([&](const auto& l, int) {
#pragma unroll
      for (int i = 0; i < Columns::N; ++i)
        f(l[i], [&](uint32_t bin) {
          atomicAdd(own.count + bin, 1u);
          if (has_mass_) atomicAdd(own.loss + bin, rounded(exponent_.loss(l[i]) * units_));
        });
      return true;
    });
    meet();
    // Each block adds up some of the words, for all.
    const int words = (has_mass_ ? 2 : 1) * kBins / Cluster::blocks();
    for (int i = threadIdx.x; i < words; i += kThreads) {
      const int word = Cluster::rank() * words + i;
      uint32_t sum = 0;
#pragma unroll
      for (int block = 0; block < kMostBlocks; ++block)
        if (block < Cluster::blocks()) sum += remote(own.count, block)[word];
#pragma unroll
      for (int block = 0; block < kMostBlocks; ++block)
        if (block < Cluster::blocks()) remote(all.count, block)[word] = sum;
    }
    meet();
  }

  // `largest(bin)`: the largest e of a bin.
  template <typename F>
  __device__ Scan scan_of(const Histogram& histogram, F largest) {
    const int own_warp = threadIdx.x / kWarp;
    Scan scan{};
    Sums sums{};
#pragma unroll
    for (int i = 0; i < kThreadBins; ++i) {
      const int bin = threadIdx.x * kThreadBins + i;
      const double units = static_cast<double>(histogram.count[bin]) * units_ - (has_mass_ ? histogram.loss[bin] : 0);
      scan.own[i] = {histogram.count[bin], static_cast<uint64_t>(units * (largest(bin) * kMassOfUnit))};
      sums += scan.own[i];
    }
    const Sums until{warp_scan(sums.count), warp_scan(sums.mass)};
    if (lane() == kWarp - 1) shared_.scan[own_warp] = until;
    __syncthreads();
    scan.before = {until.count - sums.count, until.mass - sums.mass};
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp < own_warp) scan.before += shared_.scan[warp];
      scan.total += shared_.scan[warp];
    }
    return scan;
  }

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

// A column of what is kept, of which log2(e) is no less than `least`, and the logarithm of its probability. A thread of
// the row has them, of all others the column is -1.
struct Drawn {
  int col = -1;
  float l = 0, sum = 0;
};

template <typename Columns>
__device__ Drawn draw(Shared& shared, const Columns& columns, const Exponent& exponent, const Border& border,
                      float least, float uniform) {
  constexpr int N = Columns::N;
  const auto e_of = [&](float l) {
    const float log2_e = exponent.log2_of(l);
    return log2_e >= least ? exp2_estimate(log2_e) : 0.0f;
  };
  Part part{};
  columns.template for_each<kNear>([&](const auto& l, int) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      part.sum += l[i] > border.l ? e_of(l[i]) : 0.0f;
      part.equals += l[i] == border.l;
    }
    return true;
  });
  part = {group_sum<kWarp>(part.sum), group_sum<kWarp>(part.equals)};
  const int own = Cluster::rank() * kWarps + threadIdx.x / kWarp;
  if (lane() < Cluster::blocks()) *remote(shared.parts + own, lane()) = part;
  meet();

  // The part in which u times the sum of all is passed: every warp finds the same.
  constexpr int kOfLane = kMostBlocks * kWarps / kWarp;
  Part parts[kOfLane];
  uint32_t equals = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int at = lane() * kOfLane + i;
    parts[i] = at < Cluster::blocks() * kWarps ? shared.parts[at] : Part{};
    equals += parts[i].equals;
  }
  equals = warp_scan(equals) - equals;  // before this lane's parts
  const float e_of_equals = e_of(border.l);
  double sum = 0;
#pragma unroll
  for (Part& each : parts) {
    const uint32_t left = border.equals - min(border.equals, equals);  // to be kept of this part and those behind it
    equals += each.equals;
    each.sum += static_cast<float>(min(left, each.equals)) * e_of_equals;
    each.equals = left;
    sum += each.sum;
  }
  const double until = warp_scan(sum), all = __shfl_sync(kAll, until, kWarp - 1), target = uniform * all;
  sum = until - sum;
  int passing = -1;
  float rest = 0;  // of the target behind the parts before
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    if (passing < 0 && parts[i].sum > 0 && sum + parts[i].sum > target)
      passing = lane() * kOfLane + i, rest = static_cast<float>(target - sum), equals = parts[i].equals;
    sum += parts[i].sum;
  }
  const int passing_lane = __ffs(__ballot_sync(kAll, passing >= 0)) - 1;
  if (__shfl_sync(kAll, passing, passing_lane) != own) return {};
  rest = __shfl_sync(kAll, rest, passing_lane);
  equals = __shfl_sync(kAll, equals, passing_lane);

  // Of this lane's columns with an e the last, up to that which passes.
  Drawn drawn{-1, 0, static_cast<float>(all)};
  columns.template for_each<1>([&](const auto& l, int col) {
    uint32_t equals_of_lane = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) equals_of_lane += l[i] == border.l;
    const uint32_t equals_until = warp_scan(equals_of_lane);
    uint32_t place = equals_until - equals_of_lane;  // among what is equal
    float e[N], of_lane = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool is_kept = l[i] > border.l || (l[i] == border.l && place++ < equals);
      of_lane += e[i] = is_kept ? e_of(l[i]) : 0.0f;
    }
    const float until = warp_scan(of_lane);
    const unsigned passing = __ballot_sync(kAll, of_lane > 0 && until > rest);
    float before = until - of_lane;
    if (passing == 0 || lane() < __ffs(passing)) {
      bool has_passed = false;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (e[i] > 0 && !has_passed) drawn.col = col + i, drawn.l = l[i];
        has_passed |= (before += e[i]) > rest;
      }
    }
    rest -= __shfl_sync(kAll, until, kWarp - 1);
    equals -= min(equals, __shfl_sync(kAll, equals_until, kWarp - 1));
    return passing == 0;
  });
  if (drawn.col < warp_max(drawn.col)) drawn.col = -1;
  return drawn;
}

template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(kThreads, 2) sample_kernel(Sample p, MaskLaunch masks, int span, float units) {
  __shared__ Shared shared;
  if (Cluster::blocks() > 1) Cluster::arrive();
  const int64_t index = blockIdx.x / Cluster::blocks();
  const float uniform = __ldg(p.uniform + index), temperature = __ldg(p.temperature + index);
  const int top_k = p.top_k ? __ldg(p.top_k + index) : 0;
  const float top_p = p.top_p ? __ldg(p.top_p + index) : 1, min_p = p.min_p ? __ldg(p.min_p + index) : 0;

  const int warp = Cluster::rank() * kWarps + threadIdx.x / kWarp;
  const Slice<T, ALIGNED> columns(p, masks, index, span, warp);
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
    border =
        Search<T, Slice<T, ALIGNED>>(shared, columns, exponent, units, has_top_p).find(has_top_k ? top_k : 0, top_p);
  const Drawn drawn = draw(shared, columns, exponent, border, log2f(min_p), uniform);
  if (drawn.col < 0) return;
  p.ids[index] = drawn.col;
  p.log_probs[index] = exponent.distance(drawn.l) / (temperature * exponent.power) - logf(drawn.sum);
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
