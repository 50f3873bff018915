// The rows of RMSNorm and LayerNorm.
#pragma once

#include "engine/cpu/row_loop.h"
#include "ops/norm/call.h"
#include "ops/shared/cpu/rows.h"

namespace jaxnorm::cpu {
namespace {

// Calls f(Stats{}) with the statistics of a kind.
template <class F>
void with_stats(Kind kind, F f) {
  kind == Kind::rms ? f(Rms{}) : f(Layer{});
}

void norm(const NormForward& p, const Addition* addition, int64_t begin, int64_t end, int64_t traffic) {
  with_stats(p.kind, [&](auto stats) {
    with_types(p.x.dtype, p.y.dtype, [&](auto x, auto y) {
      const Stored<decltype(x)> load{p.x, p.cols, addition};
      const OutputRows<decltype(y)> y_rows(p.y, p.y_stride, traffic);
      const Write<decltype(y)> write{p.cols, y_rows, p.scale, p.bias, p.weight_rows, !p.multiply_before_cast};
      for_rows<decltype(stats)>(p, begin, end, traffic, load, write);
    });
  });
}

template <class X, class Dy>
struct NormGrad {
  const NormBackward& p;
  InputRows<X> x, dsum;
  InputRows<Dy> dy;
  OutputRows<X> dx;
  float *dscale, *dbias;

  NormGrad(const NormBackward& p, float* dscale, float* dbias, int64_t traffic)
      : p(p),
        x(p.x, p.cols, traffic),
        dsum(p.dsum, p.cols),
        dy(p.dy, p.dy_stride, traffic),
        dx(p.dx, p.cols, traffic),
        dscale(dscale),
        dbias(dbias) {}

  DyAndX<Dy, X> operands(int64_t row) const { return {dy.reader(row), x.reader(row)}; }
  WriteDx<X> result(int64_t row) const { return {dx[row], dsum[row]}; }
  GradWeights weights(int64_t row) const { return grad_weights(p, row, dscale, dbias); }
};

void norm_grad(const NormBackward& p, int64_t begin, int64_t end, float* dscale, float* dbias, int64_t traffic) {
  with_stats(p.kind, [&](auto stats) {
    with_types(p.x.dtype, p.dy.dtype, [&](auto x, auto dy) {
      const NormGrad<decltype(x), decltype(dy)> op(p, dscale, dbias, traffic);
      for_grad_rows<decltype(stats)>(p, begin, end, op);
    });
  });
}

}  // namespace
}  // namespace jaxnorm::cpu
