// The statistics of softmax and cross-entropy: the largest logit of a row, and the sum of the exponentials of all
// logits' distances from it.
#pragma once

#include "cuda/ops/logits.cuh"

namespace jaxnorm::cuda {

// The largest x of vectors, or the smallest: of those that are numbers, as what is not a number shows in the sum.
template <typename X, bool SMALLEST>
class Extreme {
 public:
  template <int N>
  __device__ void add(const Packed<X, N>& vector) {
    if constexpr (N == 1) {
      value_ = pick(value_, static_cast<float>(vector.element));
    } else if constexpr (sizeof(X) == 4) {
      const auto at = [&](int i) { return __uint_as_float(vector.word[i]); };
      value_ = pick(value_, pick(pick(at(0), at(1)), pick(at(2), at(3))));
    } else {
      const uint32_t (&word)[N / 2] = vector.word;
      pair_ = pick_pairs(pair_, pick_pairs(pick_pairs(word[0], word[1]), pick_pairs(word[2], word[3])));
    }
  }

  __device__ float value() const {
    if constexpr (sizeof(X) == 4) {
      return value_;
    } else {
      float pair[2];
      unpack(Packed<X, 2>{{pair_}}, pair);
      return pick(value_, pick(pair[0], pair[1]));
    }
  }

 private:
  using Pair = std::conditional_t<std::is_same_v<X, __half>, __half2, __nv_bfloat162>;

  __device__ static float pick(float a, float b) { return SMALLEST ? fminf(a, b) : fmaxf(a, b); }
  __device__ static uint32_t pick_pairs(uint32_t a, uint32_t b) {
    const Pair x = reinterpret_cast<const Pair&>(a), y = reinterpret_cast<const Pair&>(b);
    const Pair picked = SMALLEST ? __hmin2(x, y) : __hmax2(x, y);
    return reinterpret_cast<const uint32_t&>(picked);
  }

  float value_ = SMALLEST ? INFINITY : -INFINITY;
  uint32_t pair_ = kInfinity<X> | (SMALLEST ? 0 : kSign<X>);  // of a half type, two columns' at once
};

// A share of a row: the maximum of its w, its sum of exponentials and, of cross-entropy, its sum of t; and what is the
// same for all shares, log2_unit. A share without any column that counts has a sum of 0, and a maximum that is not a
// number. One whose logits are all -inf has a sum of 0 and a maximum of -inf. Of all others the sum is 1 or more.
// CROSS: as of LogitRow; without a sum of t there is room for a ticket.
template <bool CROSS>
struct MaxSumPart {
  float value[4];
  static constexpr int kTicket = CROSS ? -1 : 2;

  __device__ float max() const { return max_of(value[0], value[1]); }
  __device__ float sum() const { return value[1]; }
  __device__ float total() const { return value[2]; }

  // Of what may be a share without columns, one of a lane that has none included.
  __device__ static float max_of(float max, float sum) { return sum == 0 && max > -INFINITY ? NAN : max; }

  __device__ static MaxSumPart merge(const MaxSumPart& part, const MaxSumPart& first, int count, float) {
    const float log2_unit = first.value[3];
    const float max = over_parts(part.max(), count, [](float a, float b) { return fmaxf(a, b); });
    const float factor = exp2_estimate((part.value[0] - origin_of(max)) * log2_unit);
    const float sum = sum_of_parts(part.sum() == 0 ? 0.0f : part.sum() * factor, count);
    return {{max, sum, CROSS ? sum_of_parts(part.total(), count) : 0, log2_unit}};
  }
};

template <bool CROSS>
struct MaxSum {
  using Part = MaxSumPart<CROSS>;
  using TicketPart = Part;

  template <typename Tile, typename Row, typename Group>
  __device__ static Part warp_part(Row& x, const Group& group, float) {
    static_assert(Row::kCross == CROSS);
    Thread<Tile, Row> thread;
    if constexpr (Tile::STREAMED) {
      thread.stream(x, group);
    } else {
      thread.add_all(x, group);
    }
    const LogitScale& scale = x.scale();
    const float sum = thread.sum(), own = thread.max(x, group, sum), max = group.warp_max(own);
    const float factor = scale.between(own, origin_of(max));
    return {{max, group.warp_sum(sum == 0 ? 0.0f : sum * factor),
             CROSS && scale.with_total ? group.warp_sum(thread.total()) : 0, scale.log2_unit}};
  }

 private:
  // What a thread has of a row.
  template <typename Tile, typename Row>
  class Thread {
    using Vector = typename Row::Vector;
    static constexpr int N = Tile::N;

   public:
    // The maximum first, and then the sum.
    template <typename Group>
    __device__ void add_all(Row& x, const Group& group) {
      const auto extreme = [&](auto smallest) {
        Extreme<typename Row::Element, decltype(smallest)::value> extreme;
        x.for_each(group, [&](int, auto, int, const Vector& vector) { extreme.add(vector); });
        return extreme.value();
      };
      max_ = w_of(x, x.scale().descending ? extreme(std::true_type{}) : extreme(std::false_type{}));
      if constexpr (Tile::HELD != Held::nothing) x.hold_max(max_);
      const float origin = origin_of(max_);
      x.for_each(group, [&](int vec, auto col, int remaining, const Vector& vector) {
        if (x.may_count(col, remaining)) add(x, vec, col, remaining, vector, origin);
      });
    }

    // Reads the row once: where the maximum grows, what was summed up so far shrinks.
    template <typename Group>
    __device__ void stream(Row& x, const Group& group) {
      x.for_each_batch(group, [&](const auto& vectors, auto visit) {
        const auto extreme = [&](auto smallest) {
          Extreme<typename Row::Element, decltype(smallest)::value> extreme;
#pragma unroll
          for (const Vector& vector : vectors) extreme.add(vector);
          return extreme.value();
        };
        const float max =
            fmaxf(max_, w_of(x, x.scale().descending ? extreme(std::true_type{}) : extreme(std::false_type{})));
        if (max > max_) {
          whole_sum_ *= x.scale().between(max_, max);
          max_ = max;
        }
        const float origin = origin_of(max_);
        visit([&](int i, auto col, int remaining) { add(x, i, col, remaining, vectors[i], origin); });
        whole_sum_ += sum_[0] + sum_[1];
        whole_total_ += total_[0] + total_[1];
#pragma unroll
        for (int i = 0; i < 2; ++i) sum_[i] = total_[i] = 0;
      });
    }

    __device__ float sum() const { return Tile::STREAMED ? static_cast<float>(whole_sum_) : sum_[0] + sum_[1]; }
    __device__ float total() const { return Tile::STREAMED ? static_cast<float>(whole_total_) : total_[0] + total_[1]; }

    // As that of a part; `sum`: this thread's.
    template <typename Group>
    __device__ float max(const Row& x, const Group& group, float sum) const {
      if constexpr (!Row::kMasked && !Row::kCross) return max_;
      if constexpr (Row::kMasked)
        if (sum == 0) {
          bool any = false;
          for_each_vector<Tile>(group, [&](int, auto col, int remaining) { any |= x.counted(col, remaining).any(); });
          return any ? max_ : NAN;
        }
      return Part::max_of(max_, sum);
    }

   private:
    __device__ static float w_of(const Row& x, float t) {
      if constexpr (Row::kCross)
        if (x.scale().cap != 0) t = tanh_of<float>(t * x.scale().cap).value;
      return t * x.scale().factor;
    }

    __device__ void add(Row& x, int vec, int64_t col, int remaining, const Vector& vector, float origin) {
      float t[N];
      x.unpack_t(col, remaining, vector, t);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float exponential = x.scale().exponential(t[i], origin);
        sum_[i % 2] += exponential;
        if constexpr (Row::kHoldsValues) t[i] = x.holds_t() ? t[i] : exponential;
      }
      if constexpr (Row::kHoldsValues) x.hold(vec, t);
      if constexpr (Row::kCross)
        if (x.scale().with_total) {
          x.set_others(col, remaining, 0, t);
#pragma unroll
          for (int i = 0; i < N; ++i) total_[i % 2] += t[i];
        }
    }

    float max_ = -INFINITY;
    // Two halves that do not wait for each other. Thousands of terms, as of a streamed row, need more than f32.
    float sum_[2] = {}, total_[2] = {};
    double whole_sum_ = 0, whole_total_ = 0;
  };
};

}  // namespace jaxnorm::cuda
