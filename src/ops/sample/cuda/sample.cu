// The next token of each row of logits. A row is read again in each pass, by a block or by a cluster, in which each
// warp has neighbouring columns:
//
// 1. The maximum, and its column.
// 2. The border of what is kept, if there is a top_k or a top_p.
// 3. The sum of what is kept, warp by warp.
// 4. The column at which u times the sum is passed, in the columns of the warp that says so.
//
// Filters keep the beginning of one order: by descending l, equals by ascending column. Where it ends is found by
// histograms. The first one's bins are equal steps of log2(e), those of the next are equal steps of the bits of l
// within the bin in which the border is, until that has one l, and if that is divided, of its columns. Bins count
// columns and sum up by how much each e is less than the bin's largest. They are integers, so that sums are the same in
// any order.
#include <cfloat>

#include "cuda/engine/launch.cuh"
#include "cuda/engine/unaligned.cuh"
#include "ops/sample/call.h"
#include "ops/shared/cuda/logits.cuh"

namespace jaxnorm::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;
constexpr int kMostBlocks = 8, kFewVectors = 2 * kThreads;  // of a row; and vectors that need no further block
constexpr int kAhead = 4;                                   // vectors that a thread has asked for at once
constexpr int kLine = 8;                                    // vectors in a line of memory
constexpr int kBinBits = 10, kBins = 1 << kBinBits, kThreadBins = kBins / kThreads;
constexpr float kOctaves = 40, kBinOctaves = kOctaves / kBins;  // of log2(e) in the first histogram, and in a bin of it
constexpr float kLeastOctaves = 127;                            // e of so many below the largest is 0
constexpr float kLog2E = 1.442695041f, kLn2 = 0.6931471806f;
constexpr unsigned kAll = 0xffffffffu;
constexpr float kMassOfUnit = 1 << 24;  // as an integer: the mass of 2^38 units is less than 2^63

// The place of a number among all: that of -inf is kLowest, and no other number's is less.
constexpr uint32_t kLowest = 0x007fffffu;

__device__ uint32_t key_of(float l) {
  const uint32_t bits = __float_as_uint(l);
  return bits ^ (bits >> 31 ? kAll : 0x80000000u);
}

__device__ float of_key(uint32_t key) { return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key); }

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

// Columns, and their e in units of a histogram.
struct Sums {
  uint64_t count, mass;

  __device__ Sums& operator+=(const Sums& more) { return count += more.count, mass += more.mass, *this; }
  __device__ uint64_t by(bool mass_counts) const { return mass_counts ? mass : count; }
};

struct Histogram {
  uint32_t count[kBins], loss[kBins];
};

// Thread t's bins of a histogram, from kThreadBins * t on.
struct Scan {
  Sums before, own[kThreadBins], total;
};

struct Found {
  uint32_t bin;
  Sums before, own;
};

// What is kept: what is greater than l, and of what is equal the columns up to this one.
struct Border {
  float l;
  int col;
};

struct Shared {
  Histogram own, first, later;  // of this block; and of the cluster
  uint64_t warp_best[kWarps], best[kMostBlocks];
  float sums[kMostBlocks * kWarps];
  Sums scan[kWarps];
  Found found;
  uint32_t keys[2];
};

// log2(e) of a row: differences of l are exact or rounded once, and overflow only where e is 0.
struct Exponent {
  float power, top, factor;

  __device__ Exponent(float max, float temperature)
      : power(temperature >= 0x1p20f ? 0x1p-24f : 1.0f),
        top(max * power),
        factor(fminf(kLog2E / (temperature * power), FLT_MAX)) {}

  __device__ float distance(float l) const { return fmaf(l, power, -top); }
  __device__ float of(float l) const { return distance(l) * factor; }

  // The bin of the first histogram, counted in bins from the largest e on.
  __device__ float place(float l) const { return fminf(of(l) * (-1 / kBinOctaves), kBins - 1); }
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

  // Calls f(l, col) with N neighbouring columns, of which those that do not count are -inf: by all lanes equally often.
  template <typename F>
  __device__ void for_each(F f) const {
    for (int first = begin; first < end; first += kAhead * kWarp) {
      Packed<T, N> packed[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int vector = first + i * kWarp + lane(), remaining = vector < end ? cols - vector * N : 0;
        packed[i] =
            ALIGNED ? load<true, N>(row + vector * N, remaining) : load_unaligned<N>(row + vector * N, remaining);
        if (mask.where || remaining < N) packed[i] = hide(packed[i], vector * N, remaining);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        float l[N];
        unpack_plus_zero(packed[i], l);
        f(l, (first + i * kWarp + lane()) * N);
      }
    }
  }
};

template <typename T, bool ALIGNED>
class Sampler {
 public:
  using Columns = Slice<T, ALIGNED>;
  static constexpr int N = Columns::N;

  __device__ Sampler(const Columns& columns, Shared& shared, float units)
      : columns_(columns), shared_(shared), units_(units), warp_(threadIdx.x / kWarp) {}

  // The key of the largest l, and of its columns the first, of which all bits are turned; all ones if an l is NaN or
  // +inf. Until here the blocks of a cluster have only arrived.
  __device__ uint64_t best() {
    float largest = -INFINITY;
    int first = 0;
    bool is_bad = false;
    columns_.for_each([&](const float (&l)[N], int col) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        is_bad |= !(l[i] < INFINITY);
        if (l[i] > largest) largest = l[i], first = col + i;
      }
    });
    uint64_t best = is_bad ? ~uint64_t{0} : uint64_t{key_of(largest)} << 32 | ~static_cast<uint32_t>(first);
    best = warp_max(best);
    if (lane() == 0) shared_.warp_best[warp_] = best;
    __syncthreads();
    if (Cluster::blocks() > 1) Cluster::wait();
    if (warp_ == 0) {
      best = warp_max(lane() < kWarps ? shared_.warp_best[lane()] : 0);
      if (lane() < Cluster::blocks()) *remote(shared_.best + Cluster::rank(), lane()) = best;
    }
    meet();
    for (int block = 0; block < Cluster::blocks(); ++block) best = max(best, shared_.best[block]);
    return best;
  }

  // What top_k and top_p keep; 0 and 1: all.
  __device__ Border border(const Exponent& exponent, float largest, uint32_t top_k, float top_p) {
    const bool has_mass = top_p < 1;
    count(shared_.first, has_mass, exponent, [&](float l, int, auto add) {
      if (exponent.of(l) > -kLeastOctaves) add(rounded(exponent.place(l)));
    });
    const Scan scan = scan_of(shared_.first, largest_of_bin);
    Border border{-INFINITY, INT_MAX};
    uint64_t mass = scan.total.mass;
    if (top_k > 0 && top_k < scan.total.count)
      border = find(locate(scan, false, top_k), exponent, largest, has_mass, false, top_k, mass);
    if (has_mass) {
      const double of_mass = ceil(static_cast<double>(top_p) * static_cast<double>(mass));
      const uint64_t target = min(max(static_cast<uint64_t>(of_mass), uint64_t{1}), mass);
      const Border last = find(locate(scan, true, target), exponent, largest, true, true, target, mass);
      border = {last.l, last.l == border.l ? min(last.col, border.col) : last.col};
    }
    return border;
  }

  // Draws from what is kept: columns up to the border whose log2(e) is no less than `least`.
  __device__ void draw(const Sample& p, int64_t index, const Exponent& exponent, const Border& border, float least,
                       float uniform, float temperature) {
    const auto kept = [&](float l, int col) {
      const float log2_e = exponent.of(l);
      const bool is_kept = (l > border.l || (l == border.l && col <= border.col)) && log2_e >= least;
      return is_kept ? exp2_estimate(log2_e) : 0.0f;
    };
    float sum = 0;
    columns_.for_each([&](const float (&l)[N], int col) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum += kept(l[i], col + i);
    });
    sum = group_sum<kWarp>(sum);
    const int own = Cluster::rank() * kWarps + warp_;
    if (lane() < Cluster::blocks()) *remote(shared_.sums + own, lane()) = sum;
    meet();

    // The first sum with which u times all is passed: every warp finds the same.
    constexpr int kOfLane = kMostBlocks * kWarps / kWarp;
    float of_lane[kOfLane];
    double through = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int at = lane() * kOfLane + i;
      through += of_lane[i] = at < Cluster::blocks() * kWarps ? shared_.sums[at] : 0.0f;
    }
    const double until = warp_scan(through), all = __shfl_sync(kAll, until, kWarp - 1), target = uniform * all;
    through = until - through;
    int passing = -1;
    double before = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (passing < 0 && of_lane[i] > 0 && through + of_lane[i] > target)
        passing = lane() * kOfLane + i, before = through;
      through += of_lane[i];
    }
    const int passing_lane = __ffs(__ballot_sync(kAll, passing >= 0)) - 1;
    if (__shfl_sync(kAll, passing, passing_lane) != own) return;
    before = __shfl_sync(kAll, before, passing_lane);

    // This lane's last column with an e, or that which passes.
    Border drawn{0, -1};
    bool is_done = false;
    columns_.for_each([&](const float (&l)[N], int col) {
      if (is_done) return;
      double e[N], of_lane = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) of_lane += e[i] = kept(l[i], col + i);
      const double until = warp_scan(of_lane);
      const unsigned passing = __ballot_sync(kAll, before + until > target && of_lane > 0);
      double sum = before + (until - of_lane);
      bool is_past = false;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (e[i] > 0 && !is_past) drawn = {l[i], col + i};
        is_past |= (sum += e[i]) > target && e[i] > 0;
      }
      is_done = passing != 0;
      if (is_done && lane() > __ffs(passing) - 1) drawn.col = -1;
      before += __shfl_sync(kAll, until, kWarp - 1);
    });
    int last = drawn.col;
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) last = max(last, __shfl_xor_sync(kAll, last, distance));
    if (drawn.col == last && last >= 0) {
      p.ids[index] = last;
      p.log_probs[index] = exponent.distance(drawn.l) / (temperature * exponent.power) - logf(static_cast<float>(all));
    }
  }

 private:
  // In all lanes.
  __device__ static uint64_t warp_max(uint64_t value) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2)
      value = max(value, __shfl_xor_sync(kAll, value, distance));
    return value;
  }

  // All threads of the row wait for each other.
  __device__ static void meet() {
    if (Cluster::blocks() > 1) {
      Cluster::arrive();
      Cluster::wait();
    } else {
      __syncthreads();
    }
  }

  // That of a bin of the first histogram, as a part of the row's: what is rounded to a bin begins half a one before it.
  __device__ static float largest_of_bin(int bin) { return exp2f((0.5f - bin) * kBinOctaves); }

  // By how many units e is less than its bin's largest.
  __device__ uint32_t loss(float place) const {
    const float nearest = (place + 0x1p23f) - 0x1p23f, y = (place - nearest + 0.5f) * (kBinOctaves * kLn2);
    return rounded(y * fmaf(-y, fmaf(-1 / 6.0f, y, 0.5f), 1.0f) * units_);
  }

  // The row's histogram of what f(l, col, add) adds by add(bin).
  template <typename F>
  __device__ void count(Histogram& all, bool with_mass, const Exponent& exponent, F f) {
    Histogram& own = shared_.own;
    for (int i = threadIdx.x; i < kBins; i += kThreads) own.count[i] = own.loss[i] = 0;
    __syncthreads();
    columns_.for_each([&](const float (&l)[N], int col) {
#pragma unroll
      for (int i = 0; i < N; ++i)
        f(l[i], col + i, [&](uint32_t bin) {
          atomicAdd(own.count + bin, 1u);
          if (with_mass) atomicAdd(own.loss + bin, loss(exponent.place(l[i])));
        });
    });
    meet();
    // Each block adds up some of the words, for all.
    const int words = 2 * kBins / Cluster::blocks();
    for (int i = threadIdx.x; i < words; i += kThreads) {
      const int word = Cluster::rank() * words + i;
      uint32_t sum = 0;
      for (int block = 0; block < Cluster::blocks(); ++block) sum += remote(own.count, block)[word];
      for (int block = 0; block < Cluster::blocks(); ++block) remote(all.count, block)[word] = sum;
    }
    meet();
  }

  // `largest(bin)`: the largest e of a bin.
  template <typename F>
  __device__ Scan scan_of(const Histogram& histogram, F largest) {
    Scan scan{};
    Sums sums{};
#pragma unroll
    for (int i = 0; i < kThreadBins; ++i) {
      const int bin = threadIdx.x * kThreadBins + i;
      const uint64_t count = histogram.count[bin];
      const double units = static_cast<double>(count) * units_ - histogram.loss[bin];
      scan.own[i] = {count, static_cast<uint64_t>(units * (largest(bin) * kMassOfUnit))};
      sums += scan.own[i];
    }
    const Sums until{warp_scan(sums.count), warp_scan(sums.mass)};
    if (lane() == kWarp - 1) shared_.scan[warp_] = until;
    __syncthreads();
    scan.before = {until.count - sums.count, until.mass - sums.mass};
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp < warp_) scan.before += shared_.scan[warp];
      scan.total += shared_.scan[warp];
    }
    return scan;
  }

  // The bin with which the target is reached, which all have together.
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

  // The least key of what is in this bin of the first histogram or before it, by all lanes of a warp.
  __device__ static uint32_t least_key(const Exponent& exponent, float largest, uint32_t bin) {
    uint32_t low = kLowest, high = key_of(largest);  // beyond it; and one that is not
    while (high - low > 1) {
      const uint32_t step = (high - low + kWarp) / (kWarp + 1), at = low + (lane() + 1) * step;
      const int beyond = __popc(__ballot_sync(kAll, at < high && rounded(exponent.place(of_key(at))) > bin));
      low += beyond * step;
      high = min(high, low + step);
    }
    return high;
  }

  // The border at which the target is reached, in a bin of the first histogram, and the mass of what is kept.
  __device__ Border find(Found found, const Exponent& exponent, float largest, bool with_mass, bool by_mass,
                         uint64_t target, uint64_t& mass) {
    const uint32_t bin = found.bin;
    if (warp_ == 0) {
      const uint32_t key = least_key(exponent, largest, bin);
      if (lane() == 0) shared_.keys[0] = key;
    } else if (warp_ == 1) {
      const uint32_t key = bin > 0 ? least_key(exponent, largest, bin - 1) - 1 : key_of(largest);
      if (lane() == 0) shared_.keys[1] = key;
    }
    __syncthreads();
    uint32_t low = shared_.keys[0], high = shared_.keys[1];
    Sums before = found.before, own = found.own;
    const auto is_whole = [&] { return by_mass ? own.count == 1 : before.count + own.count == target; };
    while (low < high && !is_whole()) {
      const int shift = max(0, kWarp - kBinBits - __clz(high - low));
      const float least = of_key(low), most = of_key(high);
      count(shared_.later, with_mass, exponent, [&](float l, int, auto add) {
        if (l >= least && l <= most) add((high - key_of(l)) >> shift);
      });
      const Scan scan = scan_of(shared_.later, [&](int) { return largest_of_bin(bin); });
      found = locate(scan, by_mass, target - before.by(by_mass));
      before += found.before, own = found.own;
      high -= found.bin << shift;
      low = max(low, high - ((1u << shift) - 1));
    }
    const float l = of_key(low);
    mass = before.mass + own.mass;
    if (is_whole()) return {l, INT_MAX};

    // Of equals the first.
    const double of_each = static_cast<double>(own.mass) / static_cast<double>(own.count);
    uint64_t left = target - before.count;
    if (by_mass) {
      const double reached = ceil(static_cast<double>(target - before.mass) / of_each);
      left = min(max(static_cast<uint64_t>(reached), uint64_t{1}), own.count);
    }
    mass = before.mass + static_cast<uint64_t>(of_each * static_cast<double>(left));
    if (left == own.count) return {l, INT_MAX};
    int first = 0, last = columns_.cols - 1;
    while (first < last && left < own.count) {
      const int shift = max(0, kWarp - kBinBits - __clz(last - first));
      count(shared_.later, false, exponent, [&](float other, int col, auto add) {
        if (other == l && col >= first && col <= last) add((col - first) >> shift);
      });
      found = locate(scan_of(shared_.later, largest_of_bin), false, left);
      left -= found.before.count, own = found.own;
      first += found.bin << shift;
      last = min(last, first + ((1 << shift) - 1));
    }
    return {l, last};
  }

  const Columns columns_;
  Shared& shared_;
  const float units_;  // of the largest e, in which histograms have losses
  const int warp_;
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
  Sampler<T, ALIGNED> sampler({p, masks, index, span, warp}, shared, units);
  const uint64_t best = sampler.best();
  const float largest = of_key(static_cast<uint32_t>(best >> 32));
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
  Border border{-INFINITY, INT_MAX};
  const bool has_top_k = top_k > 0 && top_k < p.cols;
  if (has_top_k || top_p < 1) border = sampler.border(exponent, largest, has_top_k ? top_k : 0, top_p);
  sampler.draw(p, index, exponent, border, log2f(min_p), uniform, temperature);
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
