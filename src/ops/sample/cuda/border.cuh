// Where what top_k and top_p keep of a row ends.
//
// Both keep the beginning of one order: by descending l, equals by ascending column. The border is found by histograms.
// The first one's bins are equal steps of log2(e), those of the next are equal steps of the bits of l, within the bin
// in which the border is, until that has one l. Bins count columns and sum up by how much each e is less than the bin's
// largest. They are integers, so that sums are the same in any order.
#pragma once

#include <cfloat>

#include "engine/cuda/ptx.cuh"
#include "engine/cuda/thread_group.cuh"

namespace jaxnorm::cuda::sampling {

constexpr int kThreads = 512, kWarps = kThreads / kWarp;  // of a block
constexpr int kMostBlocks = 8;                            // of a row
constexpr int kNear = 2;  // vectors that a thread has asked for at once, if a cache is likely to have them
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
__device__ inline uint32_t rounded(float value) { return __float_as_uint(value + 0x1p23f) - 0x4b000000u; }

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
__device__ inline void meet() {
  if (Cluster::blocks() > 1) {
    Cluster::arrive();
    Cluster::wait();
  } else {
    __syncthreads();
  }
}

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

struct BorderShared {
  Histogram own, first, later;  // of this block; and of the row
  Sums scan[kWarps];
  Found found;
  uint32_t keys[2];
};

// The row's histogram from that of each block, which adds up some of the words, for all. There are always as many loads
// and stores, so that they are on their way at once.
__device__ inline void add_up(Histogram& own, Histogram& all, bool has_mass) {
  meet();
  const int blocks = Cluster::blocks(), words = (has_mass ? 2 : 1) * kBins / blocks;
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

// Finds the border of what top_k and top_p keep. `units`: of the largest e of a bin, in which losses are counted.
template <typename T, typename Columns>
class Search {
 public:
  __device__ Search(BorderShared& shared, const Columns& columns, const Exponent& exponent, float units, bool has_mass)
      : shared_(shared), columns_(columns), exponent_(exponent), units_(units), has_mass_(has_mass) {}

  // top_k 0: all.
  __device__ Border find(uint32_t top_k, float top_p) {
    count([&](float l) { return exponent_.log2_of(l) > -kLeastOctaves ? rounded(exponent_.place(l)) : kBins; });
    add_up(shared_.own, shared_.first, has_mass_);
    Border border{-INFINITY, 0};
    uint64_t mass = 0;  // of what is kept; 0: of all
#pragma unroll 1
    for (const bool by_mass : {false, true})
      if (by_mass ? has_mass_ : top_k > 0) narrow(by_mass, top_k, top_p, border, mass);
    return border;
  }

 private:
  // Keeps less, by top_p or by top_k.
  __device__ void narrow(bool by_mass, uint32_t top_k, float top_p, Border& border, uint64_t& mass) {
    uint64_t target = top_k;
    uint32_t low = 0, high = 0;  // the keys between which the border is
    float largest = 0;           // the largest e of them; 0: it is in any bin of the first histogram
    Sums before{}, own{};        // what comes before these, and what is there
    const auto is_whole = [&] { return by_mass ? own.count == 1 : before.count + own.count == target; };
    do {
      const Scan scan = scan_of(largest > 0 ? shared_.later : shared_.first, largest);
      if (largest == 0) {
        if (mass == 0) mass = scan.total.mass;
        if (!by_mass && top_k >= scan.total.count) return;
        const double of_mass = ceil(static_cast<double>(top_p) * static_cast<double>(mass));
        if (by_mass) target = min(max(static_cast<uint64_t>(of_mass), uint64_t{1}), mass);
      }
      const Found found = locate(scan, by_mass, target - before.by(by_mass));
      before += found.before, own = found.own;
      int shift = 0;
      if (largest > 0) {
        shift = shift_of(low, high);
        high -= found.bin << shift;
        low = max(low, high - ((1u << shift) - 1));
      } else {
        largest = exponent_.largest_of_bin(found.bin);
        find_keys(found.bin, low, high);
      }
      if (low == high || is_whole()) break;
      shift = shift_of(low, high);
      const float least = Key<T>::value(low), most = Key<T>::value(high);
      count([&](float l) { return l >= least && l <= most ? (high - Key<T>::of(l)) >> shift : kBins; });
      add_up(shared_.own, shared_.later, has_mass_);
    } while (true);

    Border next{Key<T>::value(low), UINT_MAX};
    mass = before.mass + own.mass;
    if (!is_whole()) {
      const double of_each = static_cast<double>(own.mass) / static_cast<double>(own.count);
      const double wanted = by_mass ? ceil(static_cast<double>(target - before.mass) / of_each)
                                    : static_cast<double>(target - before.count);
      next.equals = min(max(static_cast<uint32_t>(wanted), 1u), own.count);
      mass = before.mass + static_cast<uint64_t>(of_each * next.equals);
    }
    if (next.l == border.l) next.equals = min(next.equals, border.equals);
    border = next;
  }

  // By how many bits the keys from low to high are bins.
  __device__ static int shift_of(uint32_t low, uint32_t high) { return max(0, 32 - kBinBits - __clz(high - low)); }

  // The least and the greatest key of what is in a bin of the first histogram.
  __device__ void find_keys(uint32_t bin, uint32_t& low, uint32_t& high) {
    if (threadIdx.x < 2 * kWarp) {
      const uint32_t key = greatest_key(bin + 1 - threadIdx.x / kWarp);
      if (lane() == 0) shared_.keys[threadIdx.x / kWarp] = key;
    }
    __syncthreads();
    low = shared_.keys[0] + 1, high = shared_.keys[1];
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

  // This block's histogram, with bin_of(l) as bins; kBins is none.
  template <typename F>
  __device__ void count(F bin_of) {
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
  }

  // `largest`: the largest e of all bins; 0: those of the first histogram.
  __device__ Scan scan_of(const Histogram& histogram, float largest) {
    Scan scan;
    Sums sums{};
#pragma unroll
    for (int i = 0; i < kThreadBins; ++i) {
      const int bin = threadIdx.x * kThreadBins + i;
      const uint32_t count = histogram.count[bin];
      const double units = static_cast<double>(count) * units_ - (has_mass_ ? histogram.loss[bin] : 0);
      const float of_bin = largest > 0 ? largest : exponent_.largest_of_bin(bin);
      scan.own[i] = {static_cast<uint64_t>(units * (of_bin * kMassOfUnit)), count};
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

  BorderShared& shared_;
  const Columns& columns_;
  const Exponent& exponent_;
  const float units_;
  const bool has_mass_;
};

}  // namespace jaxnorm::cuda::sampling
