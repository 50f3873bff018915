// The epilogue of rows whose result is quantised from registers.
#pragma once

#include "cuda/ops/forward.cuh"
#include "cuda/ops/quantize.cuh"
#include "cuda/ops/quantized_weight.cuh"

namespace jaxnorm::cuda {

// One scale a row, as against one given or one for each group of columns.
__device__ inline bool is_by_row(const Forward& p) { return !p.quantized.given && p.quantized.group == p.cols; }

__device__ inline int64_t group_of(const Quantization& q, int64_t column) { return column >> (q.group == 64 ? 6 : 7); }

__device__ inline void write_scale(const Forward& p, int64_t row, int64_t scale_group, float scale) {
  const int64_t groups = is_by_row(p) ? 1 : group_of(p.quantized, p.cols);
  if (row < p.rows) p.quantized.scales[row * groups + scale_group] = scale;
}

// A row as floats in registers: unpacked once, however many passes there are over it.
template <typename Tile>
struct Floats {
  float v[Tile::VECTORS][Tile::N];

  // What a row reads of X, or of the sum that it forms.
  template <typename X, typename ThreadGroup, typename... Args>
  __device__ void read(const ThreadGroup& group, const Args&... args) {
    SumRow<X, X, Tile> row;
    row.read(group, args...);
    for_each_vector<Tile>(group, [&](int slot, auto, int left) { unpack(row.packed(slot, left), v[slot]); });
  }

  __device__ void get(int slot, int64_t, int, float (&to)[Tile::N]) const {
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) to[i] = v[slot][i];
  }
};

// What is quantised, of ROWS rows.
template <typename Tile, int ROWS>
struct Values {
  Floats<Tile> (&rows)[ROWS];

  // x_hat is to become v = (x_hat * factor + bias) * smooth. A bias has scale's type, smooth X or f32.
  template <Kind KIND, typename X, typename Scale, typename Bias, typename ThreadGroup>
  __device__ void finish(const Forward& p, const ThreadGroup& group, const Scale& scale, const Bias& bias) {
    scale.with([&](auto* type, auto factors) {
      using T = std::remove_pointer_t<decltype(type)>;
      const auto finish = [&](auto has_bias) {
        constexpr bool kBias = decltype(has_bias)::value;
        // Of so many there are no registers for several on their way.
        constexpr bool kOneByOne = kBias && Tile::VECTORS == 8 && sizeof(X) == 4;
        const auto& terms = bias.template of<T>(group);
        for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
          if (kOneByOne && left <= 0) return;
          float factor[Tile::N], term[Tile::N];
          factors(slot, first, left, factor);
          if constexpr (kBias) terms.get(slot, first, left, term);
#pragma unroll
          for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < Tile::N; ++i)
              value(r, slot, i) = kBias ? fmaf(value(r, slot, i), factor[i], term[i]) : value(r, slot, i) * factor[i];
        });
      };
      if constexpr (KIND == Kind::layer)
        if (p.bias.data) return finish(std::true_type{});
      finish(std::false_type{});
    });
    const Input& smooth = p.quantized.smooth;
    if (!smooth.data) return;
    if (smooth.dtype == kDtype<X>) {
      multiply_by(group, PackedWeight<X, Tile, Place::memory>(group, smooth));
    } else if constexpr (sizeof(X) < 4) {
      multiply_by(group, PackedWeight<float, Tile, Place::memory>(group, smooth));
    }
  }

  // Where a row has one scale and a thread group several warps: begins to reduce what rescale needs.
  template <typename ThreadGroup>
  __device__ void publish(const Forward& p, ThreadGroup& group) const {
    if constexpr (ThreadGroup::kSpansWarps)
      if (is_by_row(p)) {
        float magnitudes[ROWS];
        by_row(group, magnitudes);
        static_assert(ROWS == 1);
        group.template publish<Largest>({{group.warp_largest(magnitudes[0])}});
      }
  }

  // Multiplies by the reciprocals of the scales, which it writes. row(r): the number of row r.
  template <typename ThreadGroup, typename F>
  __device__ void rescale(const Forward& p, ThreadGroup& group, F row) {
    const Quantization& q = p.quantized;
    if (q.given) {
      const float reciprocal = 1.0f / __ldg(q.given);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) multiply_row(r, reciprocal);
    } else if (q.group != p.cols) {
      rescale_groups(p, group, row);
    } else if constexpr (ThreadGroup::kSpansWarps) {
      const float scale = scale_of(q, group.template collect<Largest>().value[0]);
      if (group.rank + group.begin == 0) write_scale(p, row(0), 0, scale);
      multiply_row(0, 1.0f / scale);
    } else {
      float magnitudes[ROWS];
      by_row(group, magnitudes);
      reciprocal_scales<Tile::LANES>(q, magnitudes, Tile::LANES, false,
                                     [&](int r, float scale) { write_scale(p, row(r), 0, scale); });
#pragma unroll
      for (int r = 0; r < ROWS; ++r) multiply_row(r, magnitudes[r]);
    }
  }

  template <typename ThreadGroup, typename F>
  __device__ void store(const Forward& p, const ThreadGroup& group, F row) const {
    uint8_t* values[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      values[r] = static_cast<uint8_t*>(p.quantized.values.data) + row(r) * p.cols;
      hide(values[r]);
    }
    with_quantized(p.quantized.values.dtype, [&](auto dtype) {
      for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
          if (r == 0 || row(r) < p.rows)
            cuda::store<true>(values[r] + first, pack_quantized<decltype(dtype)::value>(rows[r].v[slot]), left);
      });
    });
  }

 private:
  __device__ float& value(int r, int slot, int i) const { return rows[r].v[slot][i]; }

  template <typename ThreadGroup, typename Weight>
  __device__ void multiply_by(const ThreadGroup& group, const Weight& weight) {
    for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
      float factor[Tile::N];
      weight.get(slot, first, left, factor);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < Tile::N; ++i) value(r, slot, i) *= factor[i];
    });
  }

  __device__ void multiply_row(int r, float factor) {
#pragma unroll
    for (int slot = 0; slot < Tile::VECTORS; ++slot)
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) value(r, slot, i) *= factor;
  }

  // This thread's part of each row. Vectors past the row's end are not zero any more.
  template <typename ThreadGroup>
  __device__ void by_row(const ThreadGroup& group, float (&magnitudes)[ROWS]) const {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      magnitudes[r] = 0;
      for_each_vector<Tile>(group, [&](int slot, auto, int left) {
        const float larger = largest_in(magnitudes[r], rows[r].v[slot]);
        if (left > 0) magnitudes[r] = larger;
      });
    }
  }

  // A group's vectors are those of neighbouring lanes at one slot, or, of the shortest thread groups, at two. All
  // numbers are powers of two.
  template <typename ThreadGroup, typename F>
  __device__ void rescale_groups(const Forward& p, const ThreadGroup& group, F row) {
    const Quantization& q = p.quantized;
    float factors[ROWS * Tile::VECTORS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int slot = 0; slot < Tile::VECTORS; ++slot)
        factors[r * Tile::VECTORS + slot] = largest_in(0, rows[r].v[slot]);
    const int group_cols = static_cast<int>(q.group), width = min(group_cols / Tile::N, Tile::LANES);
    const int64_t first = group.begin + first_of_thread<Tile>(group) - (lane() & (width - 1)) * Tile::N;
    reciprocal_scales<Tile::LANES>(q, factors, width, group_cols > Tile::STRIDE, [&](int number, float scale) {
      const int64_t column = first + number % Tile::VECTORS * Tile::STRIDE;
      if (column < group.end && (column & (group_cols - 1)) == 0)
        write_scale(p, row(number / Tile::VECTORS), group_of(q, column), scale);
    });
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int slot = 0; slot < Tile::VECTORS; ++slot)
#pragma unroll
        for (int i = 0; i < Tile::N; ++i) value(r, slot, i) *= factors[r * Tile::VECTORS + slot];
  }
};

// The rows that a thread group has under way at once: row(0), row(1), ... of which those past the last row are not to
// be written. `memory`: where they are.
template <typename Row, typename X, int ROWS>
struct UnderWay {
  static constexpr int kRows = ROWS;
  Row x[ROWS];
  Statistics s[ROWS];
  const X* memory[ROWS];
  int64_t first, block_rows;

  __device__ int64_t row(int r) const { return first + r * block_rows; }
};

// An epilogue of rows in registers. Their statistics are known once it has called collect().
template <Kind KIND, typename X, typename Tile, bool HOLDS_SCALE>
struct QuantizeSpecialised {
  const Forward& p;

  template <typename ThreadGroup, typename Rows, typename F>
  __device__ __forceinline__ void operator()(ThreadGroup& group, Rows& rows, F collect) const {
    constexpr int kRows = Rows::kRows;
    const LoadedScale<X, Tile, ThreadGroup, HOLDS_SCALE> scale(group, p);
    collect();
    for_each_vector<Tile>(group, [&](int slot, auto, int) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (float& v : rows.x[r].v[slot]) v = x_hat<KIND>(v, rows.s[r]);
    });
    Values<Tile, kRows> values{rows.x};
    const auto row = [&](int r) { return rows.row(r); };
    values.template finish<KIND, X>(p, group, scale, LateBias<Tile>(group, p.bias));
    values.publish(p, group);
    values.rescale(p, group, row);
    values.store(p, group, row);
  }
};

}  // namespace jaxnorm::cuda
