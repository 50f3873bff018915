// Rows as floats in registers on their way to 8 bits: weights, the scales of the quantisation, and the stores.
#pragma once

#include "engine/cuda/weight.cuh"
#include "ops/norm/cuda/affine.cuh"
#include "ops/shared/cuda/quantize.cuh"

namespace jaxnorm::cuda {

// One scale a row, as against one given or one for each group of columns.
__device__ inline bool is_by_row(const QuantizedNormForward& p) {
  return !p.quantized.given && p.quantized.group == p.cols;
}

// ANY: of any of kGroups, whose 32, 64 and 128 are as far apart as 0, 1 and 2; else not the least.
template <bool ANY>
__device__ int64_t group_of(const Quantization& q, int64_t column) {
  return ANY ? (column >> 5) >> (q.group >> 6) : column >> (q.group == 64 ? 6 : 7);
}

template <bool ANY>
__device__ void write_scale(const QuantizedNormForward& p, int64_t row, int64_t scale_group, float scale) {
  const int64_t groups = is_by_row(p) ? 1 : group_of<ANY>(p.quantized, p.cols);
  if (row < p.rows) p.quantized.scales[row * groups + scale_group] = scale;
}

// scale + scale_offset, of X or of f32, which is seen at run time. Packed; HELD: in registers if it is of X.
template <typename X, typename Tile, bool HELD>
class PackedScale {
 public:
  template <typename Group>
  __device__ PackedScale(const Group& group, const QuantizedNormForward& p) : weight_(group, p.scale) {}

  __device__ void arrive(const QuantizedNormForward&) {}

  // Calls f with a null pointer of scale's type, if there is a scale.
  template <typename F>
  __device__ static void with_type(const QuantizedNormForward& p, F f) {
    if (!p.scale.data) return;
    if (p.scale.dtype == kDtype<X>) {
      f(static_cast<X*>(nullptr));
    } else if constexpr (sizeof(X) < 4) {
      f(static_cast<float*>(nullptr));
    }
  }

  // Where it is of T.
  template <typename T, bool SPANS_WARPS>
  __device__ void get(const QuantizedNormForward& p, int vec, int64_t col, int remaining, float (&to)[Tile::N]) const {
    const auto packed = weight_.template as<T>().packed(vec, col, remaining);
    // Half an addition less. The branch has late loads wait for each other, which matters where the whole block does.
    if (!SPANS_WARPS && p.scale_offset == 0.0f) return unpack_plus_zero(packed, to);
    unpack(packed, to);
    complete(true, p.scale_offset, 1.0f, to);
  }

 private:
  const EitherWeight<X, Tile, HELD ? Place::registers : Place::memory, Place::memory> weight_;
};

// The same as floats in registers, for all rows of a thread group.
template <typename X, typename Tile>
class FloatScale {
 public:
  template <typename Group>
  __device__ FloatScale(const Group& group, const QuantizedNormForward& p) : factor_(group, p.scale) {}

  __device__ void arrive(const QuantizedNormForward& p) { factor_.arrive(p.scale_offset, 1.0f); }

  // One that is absent is 1. Where X is f32 too there is a branch for each: without it the compiler would spill.
  template <typename F>
  __device__ static void with_type(const QuantizedNormForward& p, F f) {
    if (p.scale.dtype == kDtype<X>) {
      f(static_cast<X*>(nullptr));
    } else {
      f(static_cast<float*>(nullptr));
    }
  }

  template <typename T, bool SPANS_WARPS>
  __device__ void get(const QuantizedNormForward&, int vec, int64_t, int, float (&to)[Tile::N]) const {
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) to[i] = factor_[vec][i];
  }

 private:
  FloatWeight<Tile> factor_;
};

// A row, unpacked once, however many passes there are over it.
template <typename Tile>
struct Floats {
  float v[Tile::VECTORS][Tile::N];

  // What a row reads of X, or of the sum that it forms.
  template <typename X, typename Group, typename... Args>
  __device__ void read(const Group& group, const Args&... args) {
    SumRow<X, X, Tile> row;
    row.read(group, args...);
    for_each_vector<Tile>(group, [&](int vec, auto, int remaining) { unpack(row.packed(vec, remaining), v[vec]); });
  }

  __device__ void get(int vec, int64_t, int, float (&to)[Tile::N]) const {
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) to[i] = v[vec][i];
  }
};

// What is quantised, of ROWS rows. EXTRAS: what few calls want, and all others would pay for with registers: y, and
// groups of fewer threads than each has vectors.
template <typename Tile, int ROWS, bool EXTRAS = false>
struct Values {
  Floats<Tile> (&rows)[ROWS];

  // x_hat becomes y = x_hat * factor + bias. A bias has scale's type. CENTRED: whether there may be one.
  template <typename X, bool CENTRED, typename Scale, typename Bias, typename Group>
  __device__ void apply_weights(const QuantizedNormForward& p, const Group& group, const Scale& scale,
                                const Bias& bias) {
    const auto apply = [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      if constexpr (CENTRED)
        if (p.bias.data) return apply_affine<T, true>(p, group, scale, bias.template as<T>(), sizeof(X));
      apply_affine<T, false>(p, group, scale, bias.template as<T>(), sizeof(X));
    };
    Scale::with_type(p, apply);
  }

  // Writes y, of X, where it is wanted. row(r): the number of row r.
  template <typename X, typename Group, typename F>
  __device__ void store_y(const QuantizedNormForward& p, const Group& group, F row) const {
    if (!p.y.data) return;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r > 0 && row(r) >= p.rows) break;
      X* y = static_cast<X*>(p.y.data) + row(r) * p.cols;
      hide(y);
      for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
        cuda::store<true>(y + col, pack<X>(rows[r].v[vec]), remaining);
      });
    }
  }

  // y becomes v = y * smooth, which is of X or f32.
  template <typename X, typename Group>
  __device__ void apply_smooth(const QuantizedNormForward& p, const Group& group) {
    const Input& smooth = p.quantized.smooth;
    if (!smooth.data) return;
    if (smooth.dtype == kDtype<X>) {
      multiply_by(group, PackedWeight<X, Tile, Place::memory>(group, smooth));
    } else if constexpr (sizeof(X) < 4) {
      multiply_by(group, PackedWeight<float, Tile, Place::memory>(group, smooth));
    }
  }

  // Where a row has one scale and a thread group several warps: begins to reduce what rescale needs.
  template <typename Group>
  __device__ void publish(const QuantizedNormForward& p, Group& group) const {
    if constexpr (Group::kSpansWarps)
      if (is_by_row(p)) {
        float magnitudes[ROWS];
        largest_of_rows(group, magnitudes);
        static_assert(ROWS == 1);
        group.template publish<Largest>({{group.warp_largest(magnitudes[0])}});
      }
  }

  // Multiplies by the reciprocals of the scales, which it writes.
  template <typename Group, typename F>
  __device__ void rescale(const QuantizedNormForward& p, Group& group, F row) {
    const Quantization& q = p.quantized;
    if (q.given) {
      const float reciprocal = 1.0f / __ldg(q.given);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) multiply_row(r, reciprocal);
    } else if (q.group != p.cols) {
      rescale_groups(p, group, row);
    } else if constexpr (Group::kSpansWarps) {
      const float scale = scale_of(q, group.template collect<Largest>().value[0]);
      if (group.rank + group.begin == 0) write_scale<EXTRAS>(p, row(0), 0, scale);
      multiply_row(0, 1.0f / scale);
    } else {
      float magnitudes[ROWS];
      largest_of_rows(group, magnitudes);
      reciprocal_scales<Tile::LANES>(q, magnitudes, Tile::LANES, false,
                                     [&](int r, float scale) { write_scale<EXTRAS>(p, row(r), 0, scale); });
#pragma unroll
      for (int r = 0; r < ROWS; ++r) multiply_row(r, magnitudes[r]);
    }
  }

  template <typename Group, typename F>
  __device__ void store(const QuantizedNormForward& p, const Group& group, F row) const {
    uint8_t* values[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      values[r] = static_cast<uint8_t*>(p.quantized.values.data) + row(r) * p.cols;
      hide(values[r]);
    }
    with_quantized(p.quantized.values.dtype, [&](auto dtype) {
      for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
          if (r == 0 || row(r) < p.rows)
            cuda::store<true>(values[r] + col, pack_quantized<decltype(dtype)::value>(rows[r].v[vec]), remaining);
      });
    });
  }

 private:
  __device__ float& value(int r, int vec, int i) const { return rows[r].v[vec][i]; }

  // Weights of type T; BYTES: of an element of the row.
  template <typename T, bool BIAS, typename Scale, typename Bias, typename Group>
  __device__ void apply_affine(const QuantizedNormForward& p, const Group& group, const Scale& scale, const Bias& bias,
                               size_t bytes) {
    for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
      // Of so many there are no registers for several on their way.
      if (BIAS && Tile::VECTORS == 8 && bytes == 4 && remaining <= 0) return;
      float factor[Tile::N], term[Tile::N];
      scale.template get<T, Group::kSpansWarps>(p, vec, col, remaining, factor);
      if constexpr (BIAS) bias.get(vec, col, remaining, term);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < Tile::N; ++i) value(r, vec, i) = affine<BIAS>(value(r, vec, i), factor[i], term[i]);
    });
  }

  template <typename Group, typename Weight>
  __device__ void multiply_by(const Group& group, const Weight& weight) {
    for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
      float factor[Tile::N];
      weight.get(vec, col, remaining, factor);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < Tile::N; ++i) value(r, vec, i) *= factor[i];
    });
  }

  __device__ void multiply_row(int r, float factor) {
#pragma unroll
    for (int vec = 0; vec < Tile::VECTORS; ++vec)
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) value(r, vec, i) *= factor;
  }

  // This thread's share of each row. Vectors past the row's end are not zero any more.
  template <typename Group>
  __device__ void largest_of_rows(const Group& group, float (&magnitudes)[ROWS]) const {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      magnitudes[r] = 0;
      for_each_vector<Tile>(group, [&](int vec, auto, int remaining) {
        const float larger = largest_in(magnitudes[r], rows[r].v[vec]);
        if (remaining > 0) magnitudes[r] = larger;
      });
    }
  }

  // A group's vectors are those of neighbouring lanes with one number, or, of the shortest thread groups, with two. All
  // numbers are powers of two.
  template <typename Group, typename F>
  __device__ void rescale_groups(const QuantizedNormForward& p, const Group& group, F row) {
    const Quantization& q = p.quantized;
    float factors[ROWS * Tile::VECTORS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int vec = 0; vec < Tile::VECTORS; ++vec) factors[r * Tile::VECTORS + vec] = largest_in(0, rows[r].v[vec]);
    const int group_cols = static_cast<int>(q.group), width = min(group_cols / Tile::N, Tile::LANES);
    const int64_t first = group.begin + first_of_thread<Tile>(group) - (lane() & (width - 1)) * Tile::N;
    const auto write = [&](int number, float scale) {
      const int64_t column = first + number % Tile::VECTORS * Tile::STRIDE;
      if (column < group.end && (column & (group_cols - 1)) == 0)
        write_scale<EXTRAS>(p, row(number / Tile::VECTORS), group_of<EXTRAS>(q, column), scale);
    };
    constexpr int kLeast = EXTRAS ? static_cast<int>(kGroups[0]) / Tile::N : Tile::LANES;
    reciprocal_scales_of<Tile::LANES, kLeast>(q, factors, width, group_cols > Tile::STRIDE, write);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int vec = 0; vec < Tile::VECTORS; ++vec)
#pragma unroll
        for (int i = 0; i < Tile::N; ++i) value(r, vec, i) *= factors[r * Tile::VECTORS + vec];
  }
};

}  // namespace jaxnorm::cuda
