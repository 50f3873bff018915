// What a kernel sees of a call: pointers, dtypes and sizes, and nothing of XLA.
//
// Each op has a struct for each direction in ops/, with these as its fields. An absent operand has a null pointer.
// Pointers are aligned to their element and to nothing more.
#pragma once

#include <cstdint>
#include <functional>

namespace jaxnorm {

// Results are quantised to the last three; all other arrays are of the first three.
enum class Dtype : uint8_t { f32, f16, bf16, f8e4m3fn, f8e5m2, s8 };

constexpr bool is_quantized(Dtype dtype) { return dtype >= Dtype::f8e4m3fn; }
constexpr int size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : is_quantized(dtype) ? 1 : 2; }

// The pairs of dtypes that a kernel serves, of what it normalises and y, or of x and what it is added to: equal, or one
// f32.
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

// Which row of an operand goes with row r of x: row r / inner % count. One row for all rows of x: count 1.
struct RowMap {
  int64_t count = 1, inner = 1;
};

// The longest row that has weights of its own beside those of other rows.
constexpr int64_t kPerHeadCols = 1 << 13;

// Row r of x goes with row of(r) of an operand that has one row for several of x, along any two runs of x's leading
// axes: `outer` and `inner` say which, each as a RowMap.
struct BroadcastRows {
  RowMap outer, inner;
};

// Room for what a kernel keeps beside its results. A program may have been exported with a size that another build
// wanted, so a kernel makes do with less, and refuses a call only where it cannot.
struct Workspace {
  float* data = nullptr;
  int64_t floats = 0;
};

// How large a workspace a call wants, and what that follows from: the same on every GPU, since it is part of what is
// exported.
struct WorkspaceSize {
  int64_t floats_a_row = 0, floats = 0;
};

struct WorkspaceQuery {
  Dtype dtype;  // of what is normalised
  int64_t cols;
  int weights = 0;  // how many gradients of weights are wanted
  RowMap weight_rows;
  bool with_dx = false;
  bool keeps_row = false;   // whether a row of what is normalised is kept for each of its rows
  bool widens_row = false;  // whether a row of a half type may have to be kept as f32
};

// With these `run` is declared beside an op's struct, for each platform, without CUDA's headers:
//
//   void cpu::run(const L2NormForward& p, const ParallelFor& parallel_for);
//   Outcome cuda::run(const L2NormForward& p, Stream stream);

namespace cpu {

// Calls task(i) once for each i in [0, count), in any order and on any threads, and returns when all have returned.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& task)>;

}  // namespace cpu

namespace cuda {

// A cudaStream_t and a cudaError_t, see engine/cuda/device.h.
struct Stream;
struct Outcome;

}  // namespace cuda

}  // namespace jaxnorm
