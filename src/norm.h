// The contract between the shim and the kernels: the operands of one norm, as pointers and sizes.
//
// A kernel sees these structs and nothing of XLA. An absent operand has a null pointer. Rows are contiguous: element
// (r, c) of every array of rows lies at r * cols + c. Pointers are aligned to their element and to nothing more.
#pragma once

#include <cstdint>

namespace jaxnorm {

enum class Dtype : uint8_t { f32, f16, bf16 };
enum class Kind : uint8_t { rms, layer };

constexpr int size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

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

// y = x_hat * (scale + scale_offset) + bias, and the row statistics from which the backward rebuilds x_hat. With a
// residual it is sum = x + residual, in the residual's dtype, that is normalised; sum may be where the residual was.
struct Forward {
  Kind kind;
  int64_t rows, cols;
  Input x, residual, scale, bias;
  Output y, sum;
  float* mean;  // rows values, layer norm only; null when the statistics are not wanted
  float* rstd;  // rows values; null when the statistics are not wanted
  float epsilon, scale_offset;
  bool multiply_before_cast;  // false: x_hat is rounded to y's dtype before the multiplication by scale
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
  float* workspace;  // CUDA: partial sums of dscale and dbias, (one or two arrays) * partial_rows * cols
  float scale_offset;
};

}  // namespace jaxnorm
