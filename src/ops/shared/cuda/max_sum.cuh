// The statistics of a row of logits: the largest, and the sum of the exponentials of all logits' distances from it.
#pragma once

#include "ops/shared/cuda/logits.cuh"

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

// A share of a row: the maximum of its w; its sum of exponentials less 1, so that their logarithm keeps its digits
// where it is close to 0; and what is the same for all shares, log2_unit. Of a sum of 0 the maximum is -inf where
// logits count, and these are all -inf, and not a number where none counts. Of all others the sum is 1 or more.
//
// CROSS: as of LogitRow. Such a share has a sum of w less the maximum, too, and how many of these there are; another
// has room for a ticket.
template <bool CROSS>
struct MaxSumPart {
  float value[CROSS ? 5 : 4];
  static constexpr int kTicket = CROSS ? -1 : 2;

  __device__ float rest() const { return value[1]; }
  __device__ float total() const { return CROSS ? value[2] : 0; }
  __device__ float count() const { return CROSS ? value[4] : 0; }

  __device__ static MaxSumPart merge(const MaxSumPart& part, const MaxSumPart& first, int count, float) {
    const float log2_unit = first.value[3];
    const bool is_part = part.value[3] > 0, has_sum = is_part && part.rest() != -1;  // a lane without one has zeros
    const float own = is_part ? part.value[0] : NAN;
    const float max = over_parts(own, count, [](float a, float b) { return fmaxf(a, b); });
    const float factor = exp2_estimate((own - origin_of(max)) * log2_unit);
    const bool is_top = has_sum && own == max;
    const float rest = has_sum ? is_top ? part.rest() : (part.rest() + 1.0f) * factor : 0.0f;
    const float tops = static_cast<float>(count_of_parts(is_top, count));
    MaxSumPart whole{{max, sum_of_parts(rest, count) + (tops - 1.0f), 0, log2_unit}};
    if constexpr (CROSS) {
      const float further = part.count() > 0 ? part.count() * (origin_of(own) - origin_of(max)) : 0.0f;
      whole.value[2] = sum_of_parts(part.total() + further, count);
      whole.value[4] = sum_of_parts(part.count(), count);
    }
    return whole;
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
    const float origin = origin_of(max), factor = scale.between(own, origin);
    const float whole = group.warp_sum(sum == 0 ? 0.0f : sum * factor);
    Part part{{max, whole - 1.0f, 0, scale.log2_unit}};
    if (scale.wants_log && whole < kFewDigits) {
      if constexpr (Tile::STREAMED) {
        part.value[1] = read_rest_of<Tile>(x, group, origin);
      } else {
        part.value[1] = rest_of<Tile>(x, group, origin, factor);
      }
    }
    if constexpr (CROSS)
      if (scale.with_total) {
        const float count = thread.count(), further = count > 0 ? count * (origin_of(own) - origin) : 0.0f;
        part.value[2] = group.warp_sum(thread.total() + further);
        part.value[4] = group.warp_sum(count);
      }
    return part;
  }

 private:
  // Below it a sum to which the maximum has added 1 has too few digits of the others.
  static constexpr float kFewDigits = 1.25f;

  // The same of a streamed row, which is read once more. Not inlined, or what is seldom would take registers from what
  // is not.
  template <typename Tile, typename Row, typename Group>
  __device__ __noinline__ static float read_rest_of(Row x, Group group, float origin) {
    return rest_of<Tile>(x, group, origin, 1.0f);
  }

  // A sum less 1, by adding up what is not the maximum's apart. `factor`: between the thread's
  // own maximum and `origin`.
  template <typename Tile, typename Row, typename Group>
  __device__ static float rest_of(const Row& x, const Group& group, float origin, float factor) {
    float rest = 0, tops = 0;
    x.for_each_exponential(group, origin, factor, [&](float exponential) {
      if (exponential == 1.0f) {
        tops += 1.0f;
      } else {
        rest += exponential;
      }
    });
    return group.warp_sum(rest) + (group.warp_sum(tops) - 1.0f);
  }

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
          if constexpr (Row::kCross)
            if (x.scale().with_total) whole_total_ += count_ * (origin_of(max_) - origin_of(max));
          max_ = max;
        }
        const float origin = origin_of(max_);
        visit([&](int i, auto col, int remaining) {
          // A window has few columns for the threads of a long row.
          if (!Row::kHasWindow || x.may_count(col, remaining)) add(x, i, col, remaining, vectors[i], origin);
        });
        whole_sum_ += sum_[0] + sum_[1];
        sum_[0] = sum_[1] = 0;
        if constexpr (Row::kCross)
          if (x.scale().with_total) whole_total_ += total_, total_ = 0;
      });
    }

    __device__ float sum() const { return Tile::STREAMED ? static_cast<float>(whole_sum_) : sum_[0] + sum_[1]; }
    __device__ float total() const { return Tile::STREAMED ? static_cast<float>(whole_total_) : total_; }
    __device__ float count() const { return count_; }

    // As that of a part; `sum`: this thread's.
    template <typename Group>
    __device__ float max(const Row& x, const Group& group, float sum) const {
      if constexpr (Row::kMasked) {
        if (sum == 0) {
          bool any = false;
          for_each_vector<Tile>(group, [&](int, auto col, int remaining) { any |= x.counted(col, remaining).any(); });
          return any ? max_ : NAN;
        }
      } else if constexpr (Row::kCross) {
        // With a soft cap columns past the row's end have a w that is not -inf.
        if (sum == 0 && max_ > -INFINITY) return NAN;
      }
      return max_;
    }

   private:
    __device__ static float w_of(const Row& x, float t) {
      if constexpr (Row::kCross) t = x.scale().template t_of<float>(t);
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
          const auto counted = x.counted(col, remaining);
#pragma unroll
          for (int i = 0; i < N; ++i) {
            total_ += counted[i] ? fmaf(t[i], x.scale().factor, -origin) : 0.0f;
            count_ += counted[i] ? 1.0f : 0.0f;
          }
        }
    }

    float max_ = -INFINITY;
    // Two halves that do not wait for each other. Thousands of terms, as of a streamed row, need more than f32.
    float sum_[2] = {}, total_ = 0, count_ = 0;
    double whole_sum_ = 0, whole_total_ = 0;
  };
};

}  // namespace jaxnorm::cuda
