// The CPU kernels of the L2 norm, its readers and its table.
#include "toy/l2_norm.h"

#include "engine/cpu/row_loop.h"
#include "ffi/cpu.h"
#include "ffi/table.h"
#include "ops/shared/cpu/rows.h"

namespace toy {

using namespace jaxnorm;
using namespace jaxnorm::cpu;

struct L2 {
  float rstd;

  Vec x_hat(Vec x) const { return x * rstd; }

  template <int R, class Rows>
  static void of(const Rows& x_rows, const L2NormForward& p, L2* stats) {
    const auto square = sum<R, 1>(p.cols, [&](int row, int64_t column, auto extent, Vec* sums) {
      const Vec x = x_rows(row, column, extent);
      sums[0] = fma(x, x, sums[0]);
    });
    for (int row = 0; row < R; ++row) stats[row] = {1 / __builtin_sqrtf(square.values[row][0] + p.epsilon)};
  }
  void save(const L2NormForward& p, int64_t row) const {
    if (p.rstd) p.rstd[row] = rstd;
  }
  static L2 saved(const L2NormBackward& p, int64_t row) { return {p.rstd[row]}; }

  static constexpr int kGradSums = 1;
  static void add(Vec g, Vec x_hat, Vec* sums) { sums[0] = fma(g, x_hat, sums[0]); }
  auto gradient(const Sums<1, kGradSums>& sums) const {
    const Vec minus_sum = broadcast(-sums.values[0][0]);
    return [minus_sum, rstd = rstd](Vec g, Vec x_hat) { return fma(x_hat, minus_sum, g) * rstd; };
  }
};

void run(const L2NormForward& p, const ParallelFor& parallel_for) {
  const int64_t traffic = 2 * p.rows * p.cols * size_of(p.x.dtype);
  for_each_rows(parallel_for, p.rows, p.cols, [&](int64_t begin, int64_t end) {
    with_type(p.x.dtype, [&](auto type) {
      using X = decltype(type);
      for_rows<L2>(p, begin, end, traffic, Stored<X>{p.x, p.cols}, Write<X>{p.cols, {p.y, p.cols, traffic}});
    });
  });
}

template <class X>
struct L2NormGrad {
  InputRows<X> dy, x;
  OutputRows<X> dx;
  DyAndX<X, X> operands(int64_t row) const { return {dy.reader(row), x.reader(row)}; }
  WriteDx<X> result(int64_t row) const { return {dx[row]}; }
  GradWeights weights(int64_t) const { return {}; }
};

void run(const L2NormBackward& p, const ParallelFor& parallel_for) {
  const int64_t traffic = 3 * p.rows * p.cols * size_of(p.x.dtype);
  for_each_rows(parallel_for, p.rows, p.cols, [&](int64_t begin, int64_t end) {
    with_type(p.x.dtype, [&](auto type) {
      using X = decltype(type);
      const L2NormGrad<X> op{{p.dy, p.cols, traffic}, {p.x, p.cols, traffic}, {p.dx, p.cols, traffic}};
      for_grad_rows<L2>(p, begin, end, op);
    });
  });
}

L2NormForward read_l2_norm(Reader& in) {
  const RowShapes rows = in.rows(1);
  L2NormForward p{rows.rows, rows.cols, in.operand("x", rows.x), {}, nullptr, in.attribute<float>("epsilon")};
  p.y = in.result("y", rows.x, p.x.dtype);
  if (in.has_result(rows.statistics)) p.rstd = in.f32_result("rstd", rows.statistics);
  return p;
}

L2NormBackward read_l2_norm_grad(Reader& in) {
  const RowShapes rows = in.rows(1);
  L2NormBackward p{rows.rows, rows.cols, in.operand("dy", rows.x), {}, nullptr, {}};
  p.x = in.operand("x", rows.x, p.dy.dtype);
  p.rstd = in.f32_operand("rstd", rows.statistics);
  in.require(in.flag("with_dx"), "dx is not wanted");
  p.dx = in.result("dx", rows.x, p.x.dtype);
  return p;
}

inline constexpr std::tuple kTable{Row{"toy_l2_norm_fwd", read_l2_norm}, Row{"toy_l2_norm_bwd", read_l2_norm_grad}};

extern "C" [[gnu::visibility("default")]] XLA_FFI_Error* l2_norm_fwd(XLA_FFI_CallFrame* frame) {
  return handle<Cpu, kTable, 0>(frame);
}
extern "C" [[gnu::visibility("default")]] XLA_FFI_Error* l2_norm_bwd(XLA_FFI_CallFrame* frame) {
  return handle<Cpu, kTable, 1>(frame);
}

}  // namespace toy
