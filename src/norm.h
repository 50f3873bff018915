// The contract between the shim and the kernels: the operands of one norm, as pointers and sizes.
//
// A kernel sees these structs and nothing of XLA. An absent operand has a null pointer. Rows are contiguous: element
// (r, c) of every array of rows lies at r * cols + c. Pointers are aligned to their element and to nothing more.
#pragma once

#include <cstdint>

namespace jaxnorm {

// The last three are what results are quantised to; everything else is of the first three.
enum class Dtype : uint8_t { f32, f16, bf16, f8e4m3fn, f8e5m2, s8 };
enum class Kind : uint8_t { rms, layer };

constexpr bool is_quantized(Dtype dtype) { return dtype >= Dtype::f8e4m3fn; }
constexpr int size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : is_quantized(dtype) ? 1 : 2; }

// The largest value of a dtype that results are quantised to; of s8 the smallest is -127, so that it is symmetric.
constexpr float largest_of(Dtype dtype) {
  return dtype == Dtype::f8e4m3fn ? 448.0f : dtype == Dtype::f8e5m2 ? 57344.0f : 127.0f;
}

// The pairs of dtypes (what is normalised and y, x and the residual) that have a kernel: equal, or one of them f32.
constexpr bool is_supported(Dtype a, Dtype b) { return a == b || a == Dtype::f32 || b == Dtype::f32; }

struct Input {
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;
  explicit operator bool() const { return data != nullptr; }
};

struct Output {
  void* data = nullptr;
  Dtype dtype = Dtype::f32;
  explicit operator bool() const { return data != nullptr; }
};

// Which row of scale and bias is whose: of `count` rows, row r of x takes row r / inner % count.
struct Heads {
  int64_t count = 1, inner = 1;
};

enum class Activation : uint8_t { silu, sigmoid };

// The longest row of a norm with a gate.
constexpr int64_t kGatedCols = 1 << 14;

// What a norm is multiplied by, element by element: a = activation(data).
struct Gate {
  Input data;                                // of x's dtype
  Activation activation = Activation::silu;  // silu(v) = v * sigmoid(v)
  bool first = false;                        // x * a is normalised; otherwise y is multiplied by a
  explicit operator bool() const { return bool{data}; }
};

// How y, of f32, is quantised, each operation rounded to f32:
//   v = y * smooth                                                 (y itself where smooth is absent)
//   scale = given, or over each `group` neighbouring columns of a row
//           amax = max |v|,  1 if that is 0, else min(max(amax / largest_of(dtype), 2^-126), max_scale),
//           with power_of_two rounded up to a power of two before it is bounded
//   values = v * (1 / scale), clipped to +-largest_of(dtype), rounded to nearest even
// A NaN makes the scale of its group NaN, and an s8 of it 0.
struct Quantization {
  Output values;                 // absent: y is not quantised
  float* scales = nullptr;       // rows * (cols / group) values; null where the scale is given
  const float* given = nullptr;  // one value
  Input smooth;                  // cols factors
  int64_t group = 0;             // divides cols; cols: one scale a row; otherwise 64 or 128
  float max_scale = 0;           // infinity: unbounded
  bool power_of_two = false;
};

// y = x_hat * (scale + scale_offset) + bias, and the row statistics from which the backward rebuilds x_hat. With a
// residual it is sum = x + residual, in the residual's dtype, that is normalised; sum may be where the residual was. A
// gate goes with neither a residual nor a bias; everything between its operands and y is f32.
struct Forward {
  Kind kind;
  int64_t rows, cols;
  Input x, residual, scale, bias;
  Output y, sum;
  float* mean;  // rows values, layer norm only; null when the statistics are not wanted
  float* rstd;  // rows values; null when the statistics are not wanted
  float epsilon, scale_offset;
  bool multiply_before_cast;  // false: x_hat is rounded to y's dtype before the multiplication by scale
  Quantization quantized;     // with values: y is absent and multiply_before_cast true
  Heads heads;                // of scale and bias
  int64_t y_pad = 0;          // zeros that are written after each row of y
  Gate gate;
  uint32_t* drawn = nullptr;  // CUDA: a count, for rows that clusters draw
};

// The cotangents of x, scale and bias for the cotangent dy of y. dsum, of x's dtype, is added to dx: what else x is
// used for, where it is the sum of a residual connection.
struct Backward {
  Kind kind;
  int64_t rows, cols;
  Input dy, x, scale, dsum;
  const float *mean, *rstd;
  Output dx, dscale, dbias;
  float* row_sums;   // CUDA: rows * segments pairs of sums, for dx of rows that are cut into segments
  float* workspace;  // CUDA: partial sums of dscale and dbias, (one or two arrays) * partial_rows * heads.count * cols
  float scale_offset;
  Heads heads;         // of scale, dscale and dbias
  int64_t dy_pad = 0;  // columns after each row of dy that are not read
  Gate gate;
  Output dgate;  // wanted or not, as dx
};

// Rows of which each device has a part: the statistics of x alone, so that the devices can exchange them.
struct PartStatistics {
  Kind kind;
  int64_t rows, cols;
  Input x;
  float* mean;      // rows values, layer norm only
  float* variance;  // rows values; about the part's own mean, of RMS norm about zero
};

// And y from those of the whole rows, as Forward has it.
struct PartApply {
  Kind kind;
  int64_t rows, cols;
  Input x, scale, bias;
  Output y;
  const float* mean;  // layer norm only
  const float* rstd;
  float scale_offset;
  bool multiply_before_cast;
};

}  // namespace jaxnorm
