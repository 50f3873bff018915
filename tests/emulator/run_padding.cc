// Runs the CUDA kernels on the host with zeros after each row of y, and of dy columns that are not read, and compares
// with the same without them, bit for bit.
//
//   run_padding                    every regime
//   run_padding ROWS COLS PAD      one shape
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "array.h"
#include "cuda/engine/plan.h"
#include "ops/norm/cuda.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

int failures = 0;

bool is_padded(const Array& padded, const Array& plain, int64_t rows, int64_t cols, int64_t pad) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t col = 0; col < cols + pad; ++col) {
      const float value = padded[row * (cols + pad) + col];
      if (!(value == (col < cols ? plain[row * cols + col] : 0.0f))) return false;
    }
  return true;
}

// `dtype`: of the addend and of what is normalised.
void test(Kind kind, Dtype y_dtype, Dtype dtype, Dtype weights, int64_t rows, int64_t cols, int64_t pad,
          int64_t offset) {
  const auto name_of = [](Dtype dtype) { return dtype == Dtype::f32 ? "f32" : "bf16"; };
  const auto expect = [&](bool holds, const char* what) {
    if (holds) return;
    ++failures;
    std::printf("%s: %s, y %s, rows %s, weights %s, %ld x %ld + %ld, offset %ld\n", what,
                kind == Kind::rms ? "rms" : "layer", name_of(y_dtype), name_of(dtype), name_of(weights), rows, cols,
                pad, offset);
  };
  const bool layer = kind == Kind::layer;
  const int64_t elements = rows * cols, padded_elements = rows * (cols + pad);
  const auto x = Array::normal(y_dtype, elements, offset), addend = Array::normal(dtype, elements, offset);
  const auto scale = Array::normal(weights, cols, offset), bias = Array::normal(weights, cols, offset);
  Array sum(dtype, elements, offset), fused_sum(dtype, elements, offset);
  Array y(y_dtype, elements, offset), padded(y_dtype, padded_elements, offset), fused(y_dtype, padded_elements, offset);
  Array mean(Dtype::f32, rows), rstd(Dtype::f32, rows), tickets(Dtype::f32, 1);
  ScaledAddNormForward f{};
  f.kind = kind, f.rows = rows, f.cols = cols, f.epsilon = 1e-6f, f.multiply_before_cast = true;
  f.x = x, f.addend = addend, f.sum = sum, f.scale = scale, f.y = y, f.y_stride = cols;
  f.mean = mean.floats(), f.rstd = rstd.floats();
  if (layer) f.bias = bias;
  f.workspace = {tickets.floats(), 1};
  expect(run(f, nullptr) == cudaSuccess, "forward");
  f.y = fused, f.sum = fused_sum, f.y_stride = cols + pad;
  expect(run(f, nullptr) == cudaSuccess, "padded forward with an addend");
  expect(is_padded(fused, y, rows, cols, pad) && fused_sum == sum, "y with an addend");
  NormForward alone = f;
  alone.x = sum, alone.y = padded;
  expect(run(alone, nullptr) == cudaSuccess, "padded forward");
  expect(is_padded(padded, y, rows, cols, pad), "y");

  const auto dy = Array::normal(y_dtype, elements, offset), dsum = Array::normal(dtype, elements, offset);
  Array padded_dy(y_dtype, padded_elements, offset);  // not numbers where it is not read
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t col = 0; col < cols; ++col) padded_dy.set(row * (cols + pad) + col, dy[row * cols + col]);
  const WorkspaceSize size = norm_grad_workspace({dtype, cols, layer ? 2 : 1, {}, true});
  Array workspace(Dtype::f32, rows * size.floats_a_row + size.floats);
  for (const bool adds : {false, true}) {
    const auto run_backward = [&](const Array& dy, int64_t dy_pad, Array& dx, Array& dscale, Array& dbias) {
      NormBackward b{};
      b.kind = kind, b.rows = rows, b.cols = cols, b.mean = mean.floats(), b.rstd = rstd.floats();
      b.x = sum, b.dy = dy, b.dy_stride = cols + dy_pad, b.scale = scale, b.dx = dx, b.dscale = dscale;
      if (adds) b.dsum = dsum;
      if (layer) b.dbias = dbias;
      b.workspace = workspace.workspace();
      expect(cuda::run(b, nullptr) == cudaSuccess, "backward");
    };
    Array dx(dtype, elements, offset), dscale(Dtype::f32, cols), dbias(Dtype::f32, cols);
    Array own_dx(dtype, elements, offset), own_dscale(Dtype::f32, cols), own_dbias(Dtype::f32, cols);
    run_backward(dy, 0, dx, dscale, dbias);
    run_backward(padded_dy, pad, own_dx, own_dscale, own_dbias);
    expect(own_dx == dx, "dx");
    // A call of few rows has another order of sums, and takes rows of dy that lie on vectors only.
    const auto exact = [&](const Array& array) {
      std::vector<double> values(cols);
      for (int64_t i = 0; i < cols; ++i) values[i] = array[i];
      return values;
    };
    // Of one column dscale is next to nothing.
    expect(cols == 1 || own_dscale.error(exact(dscale)) < 1e-6, "dscale");
    expect(!layer || own_dbias.error(exact(dbias)) < 1e-6, "dbias");
  }
}

void test_all(int64_t rows, int64_t cols, int64_t pad, int64_t offset = 0) {
  constexpr Dtype f32 = Dtype::f32, bf16 = Dtype::bf16;
  constexpr Dtype combinations[][3] = {{f32, f32, f32}, {bf16, bf16, bf16}, {bf16, f32, f32}, {f32, bf16, bf16}};
  tier.begin_shape();
  for (const Kind kind : {Kind::rms, Kind::layer})
    for (const auto& [y, dtype, weights] : combinations)
      if (tier.takes()) test(kind, y, dtype, weights, rows, cols, pad, offset);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4) {
    test_all(std::atoll(argv[1]), std::atoll(argv[2]), std::atoll(argv[3]));
  } else {
    for (const int64_t cols : {1, 24, 64, 256, 257, 1024, 2880, 4097})
      for (const int64_t pad : {1, 8, 64}) test_all(13, cols, pad);
    test_all(13, 64, 64, 1);
    for (const int64_t cols : {64, 100, 257}) test_all(600, cols, 8);  // more than few
    test_all(600, 64, 7);
    test_all(600, 64, 500);  // no room for pipelines of rows with their padding
    for (const int64_t cols : {8192, 12288}) test_all(3, cols, 32);
    for (const int64_t pad : {1, 64}) test_all(3, 20'000, pad);  // clusters
    test_all(2, 20'001, 7);
    for (const int64_t pad : {1, 64}) test_all(2, 131'076, pad);
    for (const int64_t pad : {1, 64}) test_all(1, 300'000, pad);  // segments, and a row read again
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
