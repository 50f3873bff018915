// Runs the CUDA kernels on the host and compares: the norm of a sum with the sum and then the norm, bit for bit, and
// results and gradients with the formulas in float64.
//
//   run              every regime
//   run ROWS COLS    one shape
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>

#include "array.h"
#include "cuda/engine/plan.h"
#include "exact.h"
#include "ops/norm/cuda.h"

namespace {

using namespace jaxnorm;
using namespace jaxnorm::cuda;

int failures = 0;

// `offset`: of each array, in elements, so that it is aligned to them and to nothing more. A case that is not chosen
// draws its numbers all the same, so that those of others are the same in each tier.
void test(Kind kind, Dtype x_dtype, Dtype dtype, Dtype weights, int64_t rows, int64_t cols, int64_t offset,
          bool is_chosen = true) {
  const auto name_of = [](Dtype dtype) { return dtype == Dtype::f32 ? "f32" : "bf16"; };
  const auto expect = [&](bool holds, const char* what) {
    if (holds) return;
    ++failures;
    std::printf("%s: %s, x %s, addend %s, weights %s, %ld x %ld, offset %ld\n", what,
                kind == Kind::rms ? "rms" : "layer", name_of(x_dtype), name_of(dtype), name_of(weights), rows, cols,
                offset);
  };
  const bool layer = kind == Kind::layer;
  const int64_t elements = rows * cols;
  const auto x = Array::normal(x_dtype, elements, offset), addend = Array::normal(dtype, elements, offset);
  const auto dy = Array::normal(x_dtype, elements, offset), dsum = Array::normal(dtype, elements, offset);
  const auto scale = Array::normal(weights, cols, offset), bias = Array::normal(weights, cols, offset);
  const auto branch_scale = Array::normal(weights, cols, offset);
  if (!is_chosen) return;
  Array sum(dtype, elements, offset);
  for (int64_t i = 0; i < elements; ++i) sum.set(i, x[i] + addend[i]);
  const Exact exact(layer, rows, cols, sum, scale, 0.5, bias, dy, dsum);

  Array y(x_dtype, elements, offset), mean(Dtype::f32, rows), rstd(Dtype::f32, rows), tickets(Dtype::f32, 1);
  NormForward f{};
  f.kind = kind, f.rows = rows, f.cols = cols, f.epsilon = 1e-6f, f.scale_offset = 0.5f, f.multiply_before_cast = true;
  f.x = sum, f.scale = scale, f.y = y, f.y_stride = cols, f.mean = mean.floats(), f.rstd = rstd.floats();
  f.workspace = {tickets.floats(), 1};
  if (layer) f.bias = bias;
  expect(run(f, nullptr) == cudaSuccess, "forward");
  expect(y.error(exact.y) < (x_dtype == Dtype::f32 ? 1e-6 : 4e-3), "y");

  Array fused_y(x_dtype, elements, offset), fused_mean(Dtype::f32, rows), fused_rstd(Dtype::f32, rows);
  Array fused_sum(dtype, elements, offset);  // where the addend was
  for (int64_t i = 0; i < elements; ++i) fused_sum.set(i, addend[i]);
  ScaledAddNormForward fused{{f}};
  fused.x = x, fused.addend = fused_sum, fused.sum = fused_sum, fused.y = fused_y;
  fused.mean = fused_mean.floats(), fused.rstd = fused_rstd.floats();
  fused.workspace = {};  // without a count of tickets rows have a static schedule
  expect(run(fused, nullptr) == cudaSuccess, "forward with an addend");
  expect(fused_sum == sum && fused_y == y && fused_rstd == rstd && (!layer || fused_mean == mean), "fusion is exact");

  // Where nobody reads the sum.
  const auto run_without_sum = [&](const Array& expected_y, const char* what) {
    Array y_alone(x_dtype, elements, offset);
    fused.addend = addend, fused.sum = {}, fused.y = y_alone;
    expect(x_dtype != dtype || (run(fused, nullptr) == cudaSuccess && y_alone == expected_y), what);
  };
  run_without_sum(y, "y without the sum");

  Array scaled_sum(dtype, elements, offset), scaled_y(x_dtype, elements, offset);
  for (int64_t i = 0; i < elements; ++i) {
    const float product = branch_scale[i % cols] * x[i];
    scaled_sum.set(i, product + addend[i]);
    fused_sum.set(i, addend[i]);
  }
  NormForward of_sum = f;
  of_sum.x = scaled_sum, of_sum.y = scaled_y;
  fused.branch_scale = branch_scale, fused.addend = fused_sum, fused.sum = fused_sum, fused.y = fused_y;
  expect(run(of_sum, nullptr) == cudaSuccess && run(fused, nullptr) == cudaSuccess, "forward with a branch's scale");
  expect(fused_sum == scaled_sum && fused_y == scaled_y, "fusion with a branch's scale is exact");
  run_without_sum(scaled_y, "y without the sum with a branch's scale");
  expect(run(f, nullptr) == cudaSuccess, "forward");  // mean and rstd again

  const WorkspaceSize size = norm_grad_workspace({dtype, cols, 2, {}, true});
  Array workspace(Dtype::f32, rows * size.floats_a_row + size.floats);
  NormBackward b{};
  b.kind = kind, b.rows = rows, b.cols = cols, b.scale_offset = 0.5f, b.mean = mean.floats(), b.rstd = rstd.floats();
  b.x = sum, b.dy = dy, b.scale = scale, b.dy_stride = cols, b.workspace = workspace.workspace();
  const auto run_backward = [&](Array& dx, Array& dscale, Array& dbias, const char* what) {
    b.dx = dx, b.dscale = dscale;
    if (layer) b.dbias = dbias;
    expect(cuda::run(b, nullptr) == cudaSuccess, what);
  };
  const double tolerance = dtype == Dtype::f32 ? 2e-6 : 4e-3;
  Array dx(dtype, elements, offset), dscale(Dtype::f32, cols), dbias(Dtype::f32, cols);
  run_backward(dx, dscale, dbias, "backward");
  expect(cols == 1 || dx.error(exact.dx) < tolerance, "dx");  // of one column it is next to nothing
  expect(cols == 1 || dscale.error(exact.dscale) < 5e-6, "dscale");
  expect(!layer || dbias.error(exact.dbias) < 5e-6, "dbias");

  Array dx_and_dsum(dtype, elements, offset), same_dscale(Dtype::f32, cols), same_dbias(Dtype::f32, cols);
  b.dsum = dsum;
  run_backward(dx_and_dsum, same_dscale, same_dbias, "backward with dsum");
  expect(cols == 1 || dx_and_dsum.error(exact.dx_and_dsum) < tolerance, "dx + dsum");
  expect(cols == 1 || same_dscale.error(exact.dscale) < 5e-6, "dscale beside dsum");
  expect(!layer || same_dbias.error(exact.dbias) < 5e-6, "dbias beside dsum");
  // Where blocks have as many rows as without.
  const Plan plan = make_plan(Way::backward, kind, dtype, cols, kMaxCluster);
  if (beside_extra_operand(plan).rows_per_block == plan.rows_per_block)
    expect(same_dscale == dscale && (!layer || same_dbias == dbias), "dsum changes nothing else");

  // Neither dx nor a sum over rows has other bits for what else is wanted, or for a GPU with more multiprocessors.
  struct Wanted {
    bool dsum, dscale, dbias;
  };
  for (const Wanted& w : {Wanted{false, false, false}, {false, false, true}, {false, true, true}, {true, true, true}}) {
    Array same_dx(dtype, elements, offset);
    b.dsum = w.dsum ? Input(dsum) : Input(), b.dx = same_dx;
    b.dscale = w.dscale ? Output(same_dscale) : Output(), b.dbias = w.dbias ? Output(same_dbias) : Output();
    emulator::multiprocessors = 256;
    expect(cuda::run(b, nullptr) == cudaSuccess, "backward of what is wanted");
    emulator::multiprocessors = 8;
    expect(same_dx == (w.dsum ? dx_and_dsum : dx), "dx beside what else is wanted");
    expect(w.dsum || !w.dscale || same_dscale == dscale, "dscale beside what else is wanted");
    expect(!w.dbias || same_dbias.error(exact.dbias) < 5e-6, "dbias beside what else is wanted");
    expect(w.dsum || !w.dbias || !layer || same_dbias == dbias, "dbias' bits beside what else is wanted");
  }
  b.dbias = {};

  // Few rows have kernels of their own, and give the bits that they give among many.
  constexpr int64_t begin = 300, count = 15;
  if (rows < begin + count) return;
  const auto from_begin = [&](const Array& array) {
    const Input all = array;
    return Input{static_cast<const char*>(all.data) + begin * cols * size_of(all.dtype), all.dtype};
  };
  Array few_dx(dtype, count * cols, offset), few_dscale(Dtype::f32, cols), few_dbias(Dtype::f32, cols);
  b.dsum = {}, b.rows = count, b.x = from_begin(sum), b.dy = from_begin(dy), b.mean += begin, b.rstd += begin;
  run_backward(few_dx, few_dscale, few_dbias, "backward of batch rows");
  expect(std::memcmp(Input(few_dx).data, from_begin(dx).data, count * cols * size_of(dtype)) == 0, "batch rows' dx");
}

void test_all(int64_t rows, int64_t cols, int64_t offset = 0) {
  constexpr Dtype f32 = Dtype::f32, bf16 = Dtype::bf16;
  constexpr Dtype combinations[][3] = {{f32, f32, f32},   {bf16, bf16, bf16}, {bf16, bf16, f32},
                                       {bf16, f32, bf16}, {bf16, f32, f32},   {f32, bf16, f32}};
  tier.begin_shape();
  for (const Kind kind : {Kind::rms, Kind::layer})
    for (const auto& [x, addend, weights] : combinations)
      test(kind, x, addend, weights, rows, cols, offset, tier.takes());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) {
    test_all(std::atoll(argv[1]), std::atoll(argv[2]));
  } else {
    for (const int64_t cols : {1, 24, 64, 128, 257, 512, 1024})
      for (const int64_t rows : {1, 3, 37}) test_all(rows, cols);
    for (const int64_t cols : {64, 256, 768, 1024, 1152}) test_all(600, cols);  // more than few
    for (const int64_t cols : {72, 768, 1152, 4096}) test_all(7, cols, 1);
    for (const int64_t cols : {1536, 4097, 5376, 8192, 12288, 16384})
      for (const int64_t rows : {1, 5}) test_all(rows, cols);
    test_all(3, 40000);   // clusters
    test_all(30, 16400);  // that draw tickets
    // Clusters with x aligned to 8 bytes and the addend to 16.
    test(Kind::rms, Dtype::bf16, Dtype::f32, Dtype::f32, 3, 40000, 4);
    // Of which the memory of one has a row and the beginning of the next.
    for (const int64_t offset : {0, 1}) test(Kind::rms, Dtype::f32, Dtype::f32, Dtype::f32, 9, 131076 - offset, offset);
    // Rows in segments, where fewer blocks than the schedule allows leave partial sums.
    for (const Kind kind : {Kind::rms, Kind::layer}) test(kind, Dtype::f32, Dtype::f32, Dtype::f32, 9, 200000, 0);
    test_all(1, 300000);  // segments, and a row read again
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
