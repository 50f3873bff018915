// The rows of softmax and log-softmax, and their launches.
#include "engine/cpu/launch.h"
#include "engine/cpu/row_loop.h"
#include "engine/cpu/vector.h"
#include "ops/shared/cpu/logits.h"
#include "ops/shared/cpu/rows.h"
#include "ops/softmax/call.h"

namespace jaxnorm::cpu {

// Of rows [begin, end); `traffic` is how many bytes all rows of the call read and write, `kept` room for rows.
struct SoftmaxKernels {
  static const SoftmaxKernels baseline, avx2, avx512;

  void (*softmax)(const SoftmaxForward& p, int64_t begin, int64_t end, float* kept, int64_t traffic);
  void (*softmax_grad)(const SoftmaxBackward& p, int64_t begin, int64_t end, int64_t traffic);
  void (*log_softmax_grad)(const LogSoftmaxBackward& p, int64_t begin, int64_t end, int64_t traffic);
};

namespace {

// The columns of a row that its mask leaves to the caller.
template <class T>
void fill_outside(T* row, const RowMask& mask, int64_t cols, float value) {
  const int64_t end = mask.begin + mask.cols;
  fill(row, value, mask.begin);
  fill(row + end, value, cols - end);
}

// An epilogue. The exponentials are kept in the cache, or where a row is too long for that they are computed again.
template <class Y>
struct WriteSoftmax {
  const SoftmaxForward& p;
  OutputRows<Y> y;

  template <class X>
  void operator()(int64_t row, const SumOfExp<kSum>& stats, RowReader<X> x) const {
    const RowMask mask = RowMask::of(p.mask, row, p.cols);
    const RowWriter<Y> y_row = y[row].from(mask.begin);
    const Vec reciprocal = broadcast(static_cast<float>(stats.reciprocal()));
    if (const float* const kept = stats.kept) {
      for_each_vector(mask.cols, [&](int64_t column, auto extent) {
        y_row(column, mask(load(kept + column, extent) * reciprocal, column, extent, 0), extent);
      });
    } else {
      const Scaled z(p.scale);
      for_each_vector(mask.cols, [&, origin = stats.origin](int64_t column, auto extent) {
        y_row(column, mask(exp(z.difference(x(column, extent), origin)) * reciprocal, column, extent, 0), extent);
      });
    }
    fill_outside(y[row].data, mask, p.cols, 0);
  }
};

// An epilogue.
template <class Y>
struct WriteLogSoftmax {
  const SoftmaxForward& p;
  OutputRows<Y> y;

  template <class X>
  void operator()(int64_t row, const SumOfExp<kLogSum>& stats, RowReader<X> x) const {
    const RowMask mask = RowMask::of(p.mask, row, p.cols);
    const RowWriter<Y> y_row = y[row].from(mask.begin);
    const Scaled z(p.scale);
    const float log_sum = static_cast<float>(stats.log_sum());
    if (p.log_sum) p.log_sum[row] = p.top ? log_sum : static_cast<float>(stats.logsumexp(z.unit));
    if (p.top) p.top[row] = stats.top;
    for_each_vector(mask.cols, [&, origin = stats.origin](int64_t column, auto extent) {
      y_row(column, mask(z.difference(x(column, extent), origin) - log_sum, column, extent, kNothing), extent);
    });
    fill_outside(y[row].data, mask, p.cols, kNothing);
  }
};

static_assert(kTogether * kShort <= kShortFloats);

// `kept`: room for the exponentials, or null.
void softmax(const SoftmaxForward& p, int64_t begin, int64_t end, float* kept, int64_t traffic) {
  with_types(p.x.dtype, p.y.dtype, [&](auto x, auto y_type) {
    using Y = decltype(y_type);
    const OutputRows<Y> y(p.y, p.cols, traffic);
    const Scaled z(p.scale);
    const StoredLogits<decltype(x), SoftmaxForward, Scaled> load{p, z, traffic};
    if (p.log) {
      for_logit_rows<SumOfExp<kLogSum>>(p, begin, end, traffic, load, WriteLogSoftmax<Y>{p, y});
    } else if (kept) {
      const StoredLogits<decltype(x), SoftmaxForward, Scaled, true> load{p, z, traffic, kept};
      for_logit_rows<SumOfExp<kSum>>(p, begin, end, traffic, load, WriteSoftmax<Y>{p, y});
    } else {
      for_logit_rows<SumOfExp<kSum>>(p, begin, end, traffic, load, WriteSoftmax<Y>{p, y});
    }
  });
}

// The gradient of softmax, in the words of grad_loop.h: y takes x_hat's place.
struct SoftmaxGrad {
  float scale;

  Vec x_hat(Vec y) const { return y; }
  static SoftmaxGrad saved(const SoftmaxBackward& p, int64_t) { return {p.scale.whole}; }
  static constexpr int kGradSums = 1;
  static void add(Vec dy, Vec y, Vec* sums) { sums[0] = fma(dy, y, sums[0]); }
  auto gradient(const Sums<1, 1>& sums) const {
    const Vec sum = broadcast(sums.values[0][0]);
    return [sum, scale = scale](Vec dy, Vec y) { return (dy - sum) * y * scale; };
  }
};

// The logarithm of softmax takes x_hat's place.
struct LogSoftmaxGrad {
  Scaled z;
  float scale, origin, log_sum;

  Vec x_hat(Vec x) const { return z.difference(x, origin) - log_sum; }
  static LogSoftmaxGrad saved(const LogSoftmaxBackward& p, int64_t row) {
    return {Scaled(p.scale), p.scale.whole, p.top ? origin_of(p.top[row]) : 0, p.log_sum[row]};
  }
  static constexpr int kGradSums = 1;
  static void add(Vec dy, Vec, Vec* sums) { sums[0] += dy; }
  auto gradient(const Sums<1, 1>& sums) const {
    const float sum = sums.values[0][0];
    return [sum, scale = scale](Vec dy, Vec log_share) { return less_share(dy, sum, log_share) * scale; };
  }
};

// The operands of a row, of which dy counts as 0 where the mask says so.
template <class Dy, class X>
struct MaskedDyAndX {
  DyAndX<Dy, X> operands;
  RowMask mask;

  template <class Extent>
  Cotangents first(int64_t column, Extent extent) const {
    const Cotangents in = operands.first(column, extent);
    return {mask(in.d, column, extent, 0), in.h};
  }
  template <class Extent>
  Cotangents last(int64_t column, Extent extent) const {
    return operands.last(column, extent);
  }
};

template <class X>
struct WriteMaskedDx : WriteDx<X> {
  RowMask mask;

  template <class In, class Extent>
  void write(int64_t column, const In&, Vec dh, Extent extent) const {
    this->dx(column, mask(dh, column, extent, 0), extent);
  }
};

// `h` is y or x.
template <class Dy, class H, class Dx>
struct MaskedGrad {
  const Mask& mask;
  int64_t cols;
  InputRows<Dy> dy;
  InputRows<H> h;
  OutputRows<Dx> dx;

  MaskedDyAndX<Dy, H> operands(int64_t row) const {
    const RowMask of_row = RowMask::of(mask, row, cols);
    return {{dy.reader(row).from(of_row.begin), h.reader(row).from(of_row.begin)}, of_row};
  }
  WriteMaskedDx<Dx> result(int64_t row) const {
    const RowMask of_row = RowMask::of(mask, row, cols);
    return {{dx[row].from(of_row.begin)}, of_row};
  }
  GradWeights weights(int64_t) const { return {}; }
};

// Rows [begin, end), of which each has the columns that its mask leaves, and 0 in the others.
template <class Stats, class P, class Op>
void for_masked_grad_rows(const P& p, int64_t begin, int64_t end, const Op& op) {
  if (!p.mask.lengths) return for_grad_rows<Stats>(p, begin, end, op);
  P row_p = p;
  for (int64_t row = begin; row < end; ++row) {
    const RowMask mask = RowMask::of(p.mask, row, p.cols);
    row_p.cols = mask.cols;
    grad_row<Stats>(row_p, op, row);
    fill_outside(op.dx[row].data, mask, p.cols, 0);
  }
  fence();
}

void softmax_grad(const SoftmaxBackward& p, int64_t begin, int64_t end, int64_t traffic) {
  with_types(p.dy.dtype, p.dx.dtype, [&](auto dy, auto dx) {
    using Dy = decltype(dy);
    using Dx = decltype(dx);
    const MaskedGrad<Dy, Dy, Dx> op{
        p.mask, p.cols, {p.dy, p.cols, traffic}, {p.y, p.cols, traffic}, {p.dx, p.cols, traffic}};
    for_masked_grad_rows<SoftmaxGrad>(p, begin, end, op);
  });
}

void log_softmax_grad(const LogSoftmaxBackward& p, int64_t begin, int64_t end, int64_t traffic) {
  with_types(p.dy.dtype, p.x.dtype, [&](auto dy, auto x) {
    using Dy = decltype(dy);
    using X = decltype(x);
    const MaskedGrad<Dy, X, X> op{
        p.mask, p.cols, {p.dy, p.cols, traffic}, {p.x, p.cols, traffic}, {p.dx, p.cols, traffic}};
    for_masked_grad_rows<LogSoftmaxGrad>(p, begin, end, op);
  });
}

}  // namespace

const SoftmaxKernels SoftmaxKernels::JAXNORM_ISA = {cpu::softmax, cpu::softmax_grad, cpu::log_softmax_grad};

#ifdef JAXNORM_ONCE
void run(const SoftmaxForward& p, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, traffic = elements * (size_of(p.x.dtype) + size_of(p.y.dtype));
  expect_writes(p.y, elements);
  constexpr int64_t kKept = 1 << 15;  // columns, at most, of which the exponentials are kept
  for_each_rows_with_room(parallel_for, p.rows, p.cols, p.log || p.cols > kKept ? 0 : floats_of_rows(p.cols),
                          [&](int64_t begin, int64_t end, float* kept) {
                            kernels<SoftmaxKernels>().softmax(p, begin, end, kept, traffic);
                          });
}

void run(const SoftmaxBackward& p, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, traffic = elements * (2 * size_of(p.dy.dtype) + size_of(p.dx.dtype));
  expect_writes(p.dx, elements);
  for_each_rows(parallel_for, p.rows, p.cols,
                [&](int64_t begin, int64_t end) { kernels<SoftmaxKernels>().softmax_grad(p, begin, end, traffic); });
}

void run(const LogSoftmaxBackward& p, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, traffic = elements * (size_of(p.dy.dtype) + 2 * size_of(p.x.dtype));
  expect_writes(p.dx, elements);
  for_each_rows(parallel_for, p.rows, p.cols, [&](int64_t begin, int64_t end) {
    kernels<SoftmaxKernels>().log_softmax_grad(p, begin, end, traffic);
  });
}
#endif

}  // namespace jaxnorm::cpu
