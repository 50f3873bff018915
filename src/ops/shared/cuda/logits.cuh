// Logits: how z follows from x, see ops/shared/logits.h, their exponentials, and a row of them as a thread group reads
// it.
#pragma once

#include "engine/cuda/row_loop.cuh"
#include "ops/shared/cuda/mask.cuh"

namespace jaxnorm::cuda {

constexpr float kLog2e = 1.44269504f;

// exp(difference), of a logit and its row's logsumexp: as they are subtracted first, the large ones are the most exact.
__device__ inline float exponential(float difference) { return exp2_estimate(difference * kLog2e); }

// The logarithm of a share of a row that has most of it: where a gradient is a difference to 1, its digits are few.
constexpr float kMostOfRow = -0.25f;

// exp(difference) - 1, of one that is above that.
__device__ inline float exponential_less_1(float difference) {
  float factor = fmaf(difference, 1.0f / 720, 1.0f / 120);
  factor = fmaf(factor, difference, 1.0f / 24);
  factor = fmaf(factor, difference, 1.0f / 6);
  factor = fmaf(factor, difference, 0.5f);
  return fmaf(factor * difference, difference, difference);
}

// What is subtracted of a row's w: its top, but of a row where none counts 0, so that no difference is NaN.
__device__ inline float origin_of(float top) { return top > -INFINITY ? top : 0.0f; }

// Of soft caps.
struct Tanh {
  float value, complement;  // which is 1 - value²
};

// tanh(v) for values of X: of f32 to about two units in the last place, and of half types, whose rounding hides the
// rest, to as many of 1.
template <typename X>
__device__ Tanh tanh_of(float v) {
  // tanh(|v|) = 1 - 2 * rest, where rest = 1 / (1 + exp(2 |v|)): exact where it is large.
  const float rest = reciprocal_estimate(1.0f + exp2_estimate(fabsf(v) * 2.88539008f));
  Tanh result{copysignf(fmaf(-2.0f, rest, 1.0f), v), 4.0f * rest * (1.0f - rest)};
  if constexpr (sizeof(X) == 4) {
    // And where it is small, as a polynomial for |v| < 0.55.
    const float square = v * v;
    float slope = fmaf(square, 1.57394409e-2f, -5.23025943e-2f);
    slope = fmaf(slope, square, 1.33152977e-1f);
    slope = fmaf(slope, square, -3.33327681e-1f);
    const float small = fmaf(slope * square, v, v);
    if (fabsf(v) < 0.55f) result = {small, fmaf(-small, small, 1.0f)};
  }
  return result;
}

// t is x, or with a soft cap z; w is t * factor, and a logit's distance from the largest one (w - max(w)) * unit.
struct LogitScale {
  float of_cap;     // what tanh is taken of is x * of_cap
  float cap;        // 0: there is no soft cap
  float factor;     // of w
  float unit;       // not 0, as columns that do not count have a w of -inf
  float log2_unit;  // unit * log2(e)
  bool descending;  // whether w falls where x grows
  bool wants_log;   // whether the logarithm of the sum of exponentials is wanted, and not the sum
  bool with_total;

  LogitScale(const Scale& scale, float soft_cap, bool wants_log, bool with_total)
      : of_cap(soft_cap == 0 ? 0 : scale.whole / soft_cap),
        cap(soft_cap),
        factor(soft_cap != 0 ? 1.0f : scale.power),
        unit(soft_cap != 0 ? 1.0f : std::fmax(scale.unit, FLT_TRUE_MIN)),
        log2_unit(static_cast<float>(unit * 1.4426950408889634)),
        descending(scale.whole < 0),
        wants_log(wants_log),
        with_total(with_total) {}

  // 2^(the distance from `max` in w).
  __device__ float exponential(float t, float max) const { return exp2_estimate(fmaf(t, factor, -max) * log2_unit); }
  // By what a sum has to be multiplied that was made with the maximum `from`.
  __device__ float between(float from, float to) const { return exp2_estimate((from - to) * log2_unit); }

  template <typename X>
  __device__ float t_of(float x) const {
    return cap == 0 ? x : tanh_of<X>(x * of_cap).value * cap;
  }
};

// The bits of infinity, of a half type twice.
template <typename X>
constexpr uint32_t kInfinity = sizeof(X) == 4              ? 0x7f800000u
                               : std::is_same_v<X, __half> ? 0x7c007c00u
                                                           : 0x7f807f80u;
template <typename X>
constexpr uint32_t kSign = sizeof(X) == 4 ? 0x80000000u : 0x80008000u;

// What a thread keeps of its own sum until the row's statistics are known.
enum class Held : uint8_t {
  nothing,
  maximum,  // its largest w
  values,   // and its exponentials, of distances from that; of log-softmax t
};

template <typename X, typename R, Access ACCESS, Held HELD_>
struct LogitTiling : Tiling<X, R, ACCESS> {
  static constexpr Held HELD = HELD_;
};

// A thread's fragment of a row, as Row<X, Tile>. Where it holds values, a pipeline may fill the row's place again once
// the thread group has met. Columns that do not count, as those past the row's end, have an x for which w is -inf,
// unless there is a soft cap. MASK: NoMask, RowMask or WindowMask; only masked rows may go by elements. CROSS: whether
// there may be a soft cap and a total, which only cross-entropy has.
template <typename X, typename Tile, typename MASK, bool CROSS>
class LogitRow {
 public:
  using Element = X;
  using Vector = Packed<X, Tile::N>;
  static constexpr bool kMasked = MASK::kMasks, kHasWindow = MASK::kHasWindow, kCross = CROSS;
  static constexpr bool kHoldsValues = Tile::HELD == Held::values;
  static_assert(kMasked || Tile::ALIGNED);
  static_assert(!kMasked || !Tile::PIPELINED);
  static_assert(!kHoldsValues || (Tile::KEPT && !kMasked));

  // `row`: as of Row; `index`: which it is.
  template <typename P, typename Group>
  __device__ void read(const P& p, const Group& group, const X* row, [[maybe_unused]] int64_t index) {
    row_ = row;
    scale_ = &p.logits;
    if constexpr (kHoldsValues) holds_t_ = p.log;
    if constexpr (kMasked) mask_ = MASK::of(p.mask_rows, index, p.cols, p.mask.window);
    if constexpr (kHasWindow && Tile::STREAMED) p.fill_outside(columns(group), index);
    if constexpr (Tile::PIPELINED) {
      row_ += first_of_thread<Tile>(group);
      if constexpr (kHoldsValues)
        for_each_vector<Tile>(group, [&](int vec, auto, int remaining) { packed_[vec] = load_vector(vec, remaining); });
    } else if constexpr (Tile::KEPT) {
      const auto& columns = this->columns(group);
      for_each_vector<Tile>(columns, [&](int vec, auto col, int remaining) { packed_[vec] = load_x(col, remaining); });
      if constexpr (kHasWindow) p.fill_outside(columns, index);  // while they are under way
      mask_all(packed_, [&](auto g) { for_each_vector<Tile>(columns, g); });
    }
  }

  __device__ const LogitScale& scale() const { return *scale_; }

  // Those through which the following functions go.
  template <typename Group>
  __device__ decltype(auto) columns(const Group& group) const {
    return mask_.template columns<Tile::N>(group);
  }

  // Calls f(vec, col, remaining, vector) for each vector of this thread, of a streamed row for several that are under
  // way at once.
  template <typename Group, typename F>
  __device__ void for_each(const Group& group, F f) const {
    if constexpr (Tile::STREAMED) {
      for_each_batch(group, [&](const Vector(&vectors)[kBatch], auto visit) {
        visit([&](int i, int64_t col, int remaining) { f(0, col, remaining, vectors[i]); });
      });
    } else {
      for_each_vector<Tile>(columns(group), [&](int vec, auto col, int remaining) {
        f(vec, col, remaining, packed(vec, col, remaining));
      });
    }
  }

  // Calls f(vectors, visit) for each batch of vectors of a streamed row; visit(g) calls g(i, col, remaining) for each
  // of them, the i-th of the batch.
  static constexpr int kBatch = 4;
  template <typename Group, typename F>
  __device__ void for_each_batch(const Group& group, F f) const {
    const auto go = [&](auto visit) {
      Vector vectors[kBatch];
      visit([&](int i, int64_t col, int remaining) { vectors[i] = load_x(col, remaining); });
      mask_all(vectors, visit);
      f(vectors, visit);
    };
    for_each_streamed_batch<Tile, kBatch>(columns(group), go);
  }

  // Whether any of a vector's columns may count. Where columns past a length are many, it is worth a branch.
  __device__ bool may_count(int64_t col, int remaining) const { return !kMasked || mask_.within(col, remaining) > 0; }

  __device__ Counted<Tile::N> counted(int64_t col, int remaining) const {
    if constexpr (kMasked) {
      return mask_.template counted<Tile::ALIGNED, Tile::N>(col, remaining);
    } else {
      return RowMask{nullptr, INT64_MAX}.counted<true, Tile::N>(0, remaining);
    }
  }

  // t of a vector.
  __device__ void unpack_t(int64_t col, int remaining, const Vector& vector, float (&t)[Tile::N]) const {
    unpack(vector, t);
    if constexpr (CROSS)
      if (scale_->cap != 0) {
#pragma unroll
        for (int i = 0; i < Tile::N; ++i) t[i] = scale_->template t_of<float>(t[i]);
        set_others(col, remaining, -INFINITY, t);
      }
  }

  // The same, as it may be held.
  __device__ void get_t(int vec, int64_t col, int remaining, const Vector& vector, float (&t)[Tile::N]) const {
    if constexpr (kHoldsValues) {
      get_held(vec, t);
    } else {
      unpack_t(col, remaining, vector, t);
    }
  }

  // The exponentials of a vector's distances from `origin`, multiplied. Those that are held have the thread's own
  // origin.
  __device__ void get_exponentials(int vec, int64_t col, int remaining, const Vector& vector, float origin, float by,
                                   float (&to)[Tile::N]) const {
    if constexpr (kHoldsValues) {
      get_held(vec, to);
    } else {
      unpack_t(col, remaining, vector, to);
    }
#pragma unroll
    for (float& value : to) value = (kHoldsValues ? value : scale_->exponential(value, origin)) * by;
  }

  // Calls f(exponential) for each of this thread's distances from `origin`. `by`: between the
  // thread's own maximum and that.
  template <typename Group, typename F>
  __device__ void for_each_exponential(const Group& group, float origin, float by, F f) const {
    if constexpr (kHoldsValues) {
      for_each_vector<Tile>(group, [&](int vec, auto, int) {
#pragma unroll
        for (const float held : held_[vec]) f(holds_t_ ? scale_->exponential(held, origin) : held * by);
      });
    } else {
      for_each(group, [&](int, auto col, int remaining, const Vector& vector) {
        if (!may_count(col, remaining)) return;
        float t[Tile::N];
        unpack_t(col, remaining, vector, t);
#pragma unroll
        for (const float value : t) f(scale_->exponential(value, origin));
      });
    }
  }

  __device__ void hold(int vec, const float (&values)[Tile::N]) {
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) held_[vec][i] = values[i];
  }

  __device__ bool holds_t() const { return holds_t_; }

  // The largest w of this thread.
  __device__ void hold_max(float max) { max_ = max; }
  __device__ float held_max() const { return max_; }

  // Gives columns that do not count this value.
  __device__ void set_others(int64_t col, int remaining, float otherwise, float (&values)[Tile::N]) const {
    const Counted<Tile::N> counted = this->counted(col, remaining);
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) values[i] = counted[i] ? values[i] : otherwise;
  }

 private:
  __device__ uint32_t fill() const { return scale_->descending ? kInfinity<X> : kInfinity<X> | kSign<X>; }

  // x of a vector; with a mask still of columns that do not count.
  __device__ Vector load_x(int64_t col, int remaining) const {
    if constexpr (!Tile::ALIGNED) {
      return load_unaligned<Tile::N>(row_ + col, mask_.within(col, remaining));
    } else if constexpr (kMasked) {
      return load<true, Tile::N>(row_ + col, mask_.within(col, remaining));
    } else {
      return remaining > 0 ? load<true, Tile::N>(row_ + col, Tile::N) : filled();
    }
  }

  __device__ Vector filled() const {
    Vector vector;
#pragma unroll
    for (uint32_t& word : vector.word) word = fill();
    return vector;
  }

  __device__ void mask(int64_t col, int remaining, Vector& vector) const {
    if (mask_.template may_hide<Tile::N>(col, remaining)) vector = counted(col, remaining).choose(vector, fill());
  }

  // The same of all vectors that `visit` goes through. All bytes of a mask are under way at once.
  template <int COUNT, typename F>
  __device__ void mask_all(Vector (&vectors)[COUNT], F visit) const {
    if constexpr (kMasked) {
      if (mask_.where) {
        Counted<Tile::N> counted[COUNT];
        visit([&](int i, auto col, int remaining) { counted[i] = this->counted(col, remaining); });
        visit([&](int i, auto, int) { vectors[i] = counted[i].choose(vectors[i], fill()); });
      } else {
        visit([&](int i, auto col, int remaining) { mask(col, remaining, vectors[i]); });
      }
    }
  }

  __device__ Vector packed(int vec, int64_t col, int remaining) const {
    if constexpr (Tile::PIPELINED && !kHoldsValues) {
      return load_vector(vec, remaining);
    } else {
      return packed_[vec];
    }
  }

  // Of a row that a pipeline has.
  __device__ Vector load_vector(int vec, int remaining) const {
    return remaining > 0 ? load_shared<Tile::N>(row_ + vec * Tile::STRIDE) : filled();
  }

  __device__ void get_held(int vec, float (&to)[Tile::N]) const {
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) to[i] = held_[vec][i];
  }

  const X* row_ = nullptr;
  const LogitScale* scale_ = nullptr;
  MASK mask_;
  Vector packed_[(Tile::PIPELINED && !kHoldsValues) || !Tile::KEPT ? 1 : Tile::VECTORS];
  bool holds_t_ = false;
  float max_, held_[kHoldsValues ? Tile::VECTORS : 1][Tile::N];
};

// How such rows reach a thread group: as LoadRow.
template <typename X, typename Tile, typename MASK, bool CROSS>
struct LoadLogits {
  using Fragment = LogitRow<X, Tile, MASK, CROSS>;

  template <typename P, typename Group, typename Batch>
  __device__ static void read(const P& p, const Group& group, Batch& rows) {
#pragma unroll
    for (int r = 0; r < Batch::kRows; ++r) {
      const X* row = static_cast<const X*>(p.x.data) + rows.row_to_read(r) * p.cols;
      if constexpr (Tile::ALIGNED) hide(row);
      rows.x[r].read(p, group, row, rows.row_to_read(r));
    }
  }

  template <typename P, typename Group, typename Source>
  __device__ static auto pipeline(const P& p, const Group& group, const PipelineShape& shape, char* shared,
                                  const Source& rows) {
    return Pipeline<Group, false, Source, X>(group, shape, shared, rows, static_cast<const X*>(p.x.data));
  }

  template <typename P, typename Group, typename Pipeline>
  __device__ static void newest(Fragment& x, const P& p, const Group& group, const Pipeline& pipeline, int64_t row) {
    x.read(p, group, pipeline.template newest<0>(nullptr), row);
  }
  template <typename P, typename Group, typename Pipeline>
  __device__ static void oldest(Fragment& x, const P& p, const Group& group, const Pipeline& pipeline, int64_t row) {
    x.read(p, group, pipeline.template oldest<0>(nullptr), row);
  }

  template <typename Launch, typename P>
  static int shared_bytes(Launch& launch, const Plan& plan, const P& p, int held, int besides) {
    return launch.with_pipelines(plan, p.cols, {PipelineArray{sizeof(X), p.cols}}, held, besides);
  }
};

// Rows of logits are kept, also where they go by elements: those of vocabularies are often of odd lengths.
template <typename X, typename STATS>
struct LogitOp : RowOp<X, STATS> {
  template <typename R, Access ACCESS>
  using Tile = LogitTiling<X, R, ACCESS, Held::nothing>;
};

}  // namespace jaxnorm::cuda
