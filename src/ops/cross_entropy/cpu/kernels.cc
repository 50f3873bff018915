// The rows of cross-entropy with integer labels, and their launches.
#include "engine/cpu/launch.h"
#include "engine/cpu/vector.h"
#include "ops/cross_entropy/call.h"
#include "ops/shared/cpu/logits.h"

namespace jaxnorm::cpu {

// Of rows [begin, end); `traffic` is how many bytes all rows of the call read and write.
struct CrossEntropyKernels {
  static const CrossEntropyKernels baseline, avx2, avx512;

  void (*forward)(const CrossEntropyForward& p, int64_t begin, int64_t end, int64_t traffic);
  void (*backward)(const CrossEntropyBackward& p, int64_t begin, int64_t end, int64_t traffic);
};

namespace {

// Calls f(z) with what makes logits of x.
template <class F>
void with_logits(const Logits& p, F f) {
  p.soft_cap == 0 ? f(Scaled(p.scale)) : f(Capped(p.scale, p.soft_cap));
}

bool names_column(const Logits& p, int32_t label) { return label >= 0 && label < p.cols; }

// An epilogue: writes what a row has a value of.
template <class Z>
struct WriteRowValues {
  const CrossEntropyForward& p;
  Z z;

  template <class Stats, class X>
  void operator()(int64_t row, const Stats& stats, RowReader<X> x) const {
    const float origin = p.top ? stats.origin : 0;
    p.log_sum[row] = static_cast<float>(p.top ? stats.log_sum() : stats.logsumexp(z.unit));
    if (p.top) p.top[row] = stats.top;
    const int32_t label = p.labels[row];
    p.label_logit[row] = names_column(p, label) ? z.difference(load(x.data + label, Part{1}), origin)[0] : 0;
    if (!p.total) return;
    double total = stats.total;
    if (!p.top) total += static_cast<double>(stats.origin) * z.unit * RowMask::of(p.mask, row, p.cols).count();
    p.total[row] = static_cast<float>(total);
  }
};

void cross_entropy(const CrossEntropyForward& p, int64_t begin, int64_t end, int64_t traffic) {
  with_type(p.x.dtype, [&](auto x) {
    with_logits(p, [&](auto z) {
      using Z = decltype(z);
      const StoredLogits<decltype(x), CrossEntropyForward, Z> load{p, z, traffic};
      const WriteRowValues<Z> write{p, z};
      if (p.total) {
        for_logit_rows<SumOfExp<kLogSumAndTotal>>(p, begin, end, traffic, load, write);
      } else {
        for_logit_rows<SumOfExp<kLogSum>>(p, begin, end, traffic, load, write);
      }
    });
  });
}

// v, with another number in one lane.
Vec with_lane(Vec v, int64_t lane, float other) {
  float lanes[W];
  store(lanes, v, Whole{});
  lanes[lane] = other;
  return load(lanes, Whole{});
}

// dx may lie where x does.
template <class X, class Z>
[[gnu::noinline]] void cross_entropy_grad_row(const CrossEntropyBackward& p, Z z, int64_t row, RowReader<X> x,
                                              RowWriter<X> dx) {
  const int64_t label = p.labels[row];
  if (label == kIgnored) return fill(dx.data, 0, p.cols);
  const RowMask mask = RowMask::of(p.mask, row, p.cols);
  const auto scaled = [&](const float* values) { return values ? values[row] * p.scale.whole : 0; };
  const float dlog_sum = scaled(p.dlog_sum), dlabel_logit = scaled(p.dlabel_logit), dtotal = scaled(p.dtotal);
  const float origin = p.top ? origin_of(p.top[row]) : 0;
  const float log_sum = p.log_sum[row] == kNothing ? 0 : p.log_sum[row];
  float at_label = 0;
  if (names_column(p, p.labels[row])) {
    const Vec v = load(x.data + label, Part{1});
    const bool counts = !mask.where || mask.where[label];
    const Vec of_all = less_share(broadcast(dlabel_logit), -dlog_sum, z.difference(v, origin) - log_sum) + dtotal;
    const float dz = counts ? of_all[0] : dlabel_logit;
    at_label = dz == 0 ? 0 : z.grad(broadcast(dz), v)[0];
  }
  for_each_vector(p.cols, [&](int64_t column, auto extent) {
    const Vec v = mask(x(column, extent), column, extent, 0);
    const Vec softmax = exp(z.difference(v, origin) - log_sum);
    const Vec dz = mask(fma(softmax, broadcast(dlog_sum), broadcast(dtotal)), column, extent, 0);
    Vec gradient = z.grad(dz, v);
    // Here and not after the row, since a store beside one past the caches waits for it.
    if (label >= column && label < column + W) gradient = with_lane(gradient, label - column, at_label);
    dx(column, gradient, extent);
  });
}

void cross_entropy_grad(const CrossEntropyBackward& p, int64_t begin, int64_t end, int64_t traffic) {
  with_type(p.x.dtype, [&](auto x_type) {
    with_logits(p, [&](auto z) {
      using X = decltype(x_type);
      const InputRows<X> x(p.x, p.cols, traffic);
      const OutputRows<X> dx(p.dx, p.cols, p.dx.data == p.x.data ? 0 : traffic);  // else they are in the cache
      for (int64_t row = begin; row < end; ++row) cross_entropy_grad_row<X>(p, z, row, x.reader(row), dx[row]);
    });
  });
  fence();
}

}  // namespace

const CrossEntropyKernels CrossEntropyKernels::JAXNORM_ISA = {cpu::cross_entropy, cpu::cross_entropy_grad};

#ifdef JAXNORM_ONCE
void run(const CrossEntropyForward& p, const ParallelFor& parallel_for) {
  const int64_t traffic = p.rows * p.cols * size_of(p.x.dtype);
  for_each_rows(parallel_for, p.rows, p.cols,
                [&](int64_t begin, int64_t end) { kernels<CrossEntropyKernels>().forward(p, begin, end, traffic); });
}

void run(const CrossEntropyBackward& p, const ParallelFor& parallel_for) {
  const int64_t elements = p.rows * p.cols, traffic = elements * 2 * size_of(p.x.dtype);
  expect_writes(p.dx, elements);
  for_each_rows(parallel_for, p.rows, p.cols,
                [&](int64_t begin, int64_t end) { kernels<CrossEntropyKernels>().backward(p, begin, end, traffic); });
}
#endif

}  // namespace jaxnorm::cpu
