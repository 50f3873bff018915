// The rows of the sandwich norm, and their launches.
#include "engine/cpu/launch.h"
#include "ops/norm/cpu/norm_rows.h"
#include "ops/sandwich_norm/call.h"

namespace jaxnorm::cpu {

// As those of the norms.
struct SandwichNormKernels {
  static const SandwichNormKernels baseline, avx2, avx512;

  void (*forward)(const SandwichNormForward& p, int64_t begin, int64_t end, int64_t traffic);
  void (*backward)(const SandwichNormBackward& p, int64_t begin, int64_t end, float* dpost_scale, float* dscale,
                   float* row, int64_t traffic);
};

namespace {

// A load functor: the sums of addends and normalised rows of x, which it stores.
template <class X, class S>
struct NormedAndAdded {
  const SandwichNormForward& p;
  Affine affine;
  InputRows<X> x;
  InputRows<S> addend;
  OutputRows<S> sum;

  NormedAndAdded(const SandwichNormForward& p, int64_t traffic)
      : p(p),
        affine(p.post_scale, {}),
        x(p.x, p.cols, traffic),
        addend(p.addend, p.cols, traffic),
        sum(p.sum, p.cols, 0) {}  // they are read at once

  int64_t ahead(int64_t, int64_t) const { return 0; }

  template <int R>
  Rows<R, S> rows(int64_t first, int64_t count) const {
    Rms stats[R];
    Rms::of<R>(Rows<R, X>(x.data, p.cols, first, count), p, stats);
    for (int64_t i = 0; i < count; ++i) {
      if (p.post_rstd) p.post_rstd[first + i] = stats[i].rstd;
      add(stats[i], x.reader(first + i), addend.reader(first + i), sum[first + i]);
    }
    return Rows<R, S>(sum.data, p.cols, first, count);
  }

 private:
  // Each vector of the addend is read before that of the sum is written, which may lie there.
  void add(Rms stats, RowReader<X> x_row, RowReader<S> addend_row, RowWriter<S> sum_row) const {
    const bool round = !p.multiply_before_cast;
    for_each_vector(p.cols, [&, affine = affine](int64_t column, auto extent) {
      Vec x_hat = stats.x_hat(x_row(column, extent));
      if (round) x_hat = rounded_to(x_hat, X{});
      const Vec u = rounded_to(affine(x_hat, column, extent), X{});
      sum_row(column, u + addend_row(column, extent), extent);
    });
  }
};

void sandwich_norm(const SandwichNormForward& p, int64_t begin, int64_t end, int64_t traffic) {
  with_types(p.x.dtype, p.sum.dtype, [&](auto x, auto sum) {
    using X = decltype(x);
    const NormedAndAdded<X, decltype(sum)> load(p, traffic);
    const Write<X> write{p.cols, {p.y, p.cols, traffic}, p.scale, {}, {}, !p.multiply_before_cast};
    for_rows<Rms>(p, begin, end, traffic, load, write);
  });
}

// `row`: room for daddend of a row, where that is read and not wanted.
void sandwich_norm_grad(const SandwichNormBackward& p, int64_t begin, int64_t end, float* dpost_scale, float* dscale,
                        float* row, int64_t traffic) {
  with_types(p.x.dtype, p.sum.dtype, [&](auto x_type, auto sum_type) {
    using X = decltype(x_type);
    using S = decltype(sum_type);
    const Output daddend = row ? Output{row, p.sum.dtype} : p.daddend;
    const int64_t stride = row ? 0 : p.cols;
    const NormBackward of_sum = sum_grad_of(p, daddend), of_x = x_grad_of(p, daddend);
    NormGrad<S, X> sum_grad(of_sum, dscale, nullptr, traffic);
    NormGrad<X, S> x_grad(of_x, dpost_scale, nullptr, traffic);
    sum_grad.dx = OutputRows<S>(daddend, stride, 0);  // it is read at once
    x_grad.dy = InputRows<S>(of_x.dy, stride);
    for (int64_t i = begin; i < end; ++i) {
      grad_row<Rms>(of_sum, sum_grad, i);
      if (p.goes_on()) grad_row<Rms>(of_x, x_grad, i);
    }
    fence();
  });
}

}  // namespace

const SandwichNormKernels SandwichNormKernels::JAXNORM_ISA = {cpu::sandwich_norm, cpu::sandwich_norm_grad};

#ifdef JAXNORM_ONCE
void run(const SandwichNormForward& call, const ParallelFor& parallel_for) {
  SandwichNormForward p = call;
  const F32Weight post_scale(&p.post_scale, p.scale_offset, p.cols, parallel_for);
  const F32Weight scale(&p.scale, p.scale_offset, p.cols, parallel_for);
  const int64_t elements = p.rows * p.cols, traffic = elements * 2 * (size_of(p.x.dtype) + size_of(p.sum.dtype));
  expect_writes(p.y, elements);
  expect_writes(p.sum, elements);
  for_each_rows(parallel_for, p.rows, p.cols,
                [&](int64_t begin, int64_t end) { kernels<SandwichNormKernels>().forward(p, begin, end, traffic); });
}

void run(const SandwichNormBackward& call, const ParallelFor& parallel_for) {
  SandwichNormBackward p = call;
  const F32Weight post_scale(&p.post_scale, p.scale_offset, p.cols, parallel_for);
  const F32Weight scale(&p.scale, p.scale_offset, p.cols, parallel_for);
  const int64_t elements = p.rows * p.cols, traffic = elements * 3 * (size_of(p.x.dtype) + size_of(p.sum.dtype));
  expect_writes(p.dx, elements);
  expect_writes(p.daddend, elements);
  const bool keeps_row = p.goes_on() && !p.daddend;
  for_each_grad_rows(parallel_for, sum_grad_of(p, p.daddend), p.dpost_scale, p.dscale, keeps_row ? p.cols : 0,
                     [&](int64_t begin, int64_t end, float* dpost_scale, float* dscale, float* row) {
                       kernels<SandwichNormKernels>().backward(p, begin, end, dpost_scale, dscale, row, traffic);
                     });
}
#endif

}  // namespace jaxnorm::cpu
