// The rows of cross-entropy with integer labels.
#pragma once

#include "cpu/engine/types.h"
#include "cpu/ops/logits.h"
#include "ops/cross_entropy.h"

namespace jaxnorm::cpu {
namespace {

// Calls f(z) with what makes logits of x.
template <class F>
void with_logits(const Logits& p, F f) {
  p.soft_cap == 0 ? f(Scaled{p.scale}) : f(Capped{p.scale, p.soft_cap});
}

bool names_column(const Logits& p, int32_t label) { return label >= 0 && label < p.cols; }

// An epilogue: writes what a row has a value of.
template <class Z>
struct WriteRowValues {
  const CrossEntropyForward& p;
  Z z;

  template <class Stats, class X>
  void operator()(int64_t row, const Stats& stats, RowReader<X> x) const {
    p.logsumexp[row] = static_cast<float>(stats.logsumexp());
    const int32_t label = p.labels[row];
    p.label_logit[row] = names_column(p, label) ? z(load(x.data + label, Part{1}))[0] : 0;
    if (p.total) p.total[row] = static_cast<float>(stats.total);
  }
};

void cross_entropy(const CrossEntropyForward& p, int64_t begin, int64_t end, int64_t traffic) {
  with_type(p.x.dtype, [&](auto x) {
    with_logits(p, [&](auto z) {
      using Z = decltype(z);
      const StoredLogits<decltype(x), CrossEntropyForward, Z> load{p, z, traffic};
      const WriteRowValues<Z> write{p, z};
      if (p.total) {
        for_logit_rows<SumOfExp<2>>(p, begin, end, traffic, load, write);
      } else {
        for_logit_rows<SumOfExp<1>>(p, begin, end, traffic, load, write);
      }
    });
  });
}

// v, and more in one lane.
Vec add_to_lane(Vec v, int64_t lane, float more) {
  float lanes[W] = {};
  lanes[lane] = more;
  return v + load(lanes, Whole{});
}

// dx may lie where x does.
template <class X, class Z>
[[gnu::noinline]] void cross_entropy_grad_row(const CrossEntropyBackward& p, Z z, int64_t row, RowReader<X> x,
                                              RowWriter<X> dx) {
  const RowMask mask = RowMask::of(p.mask, row, p.cols);
  const auto scaled = [&](const float* values) { return values ? values[row] * p.scale : 0; };
  const float dlogsumexp = scaled(p.dlogsumexp), dlabel_logit = scaled(p.dlabel_logit), dtotal = scaled(p.dtotal);
  const float logsumexp = p.logsumexp[row];
  const int64_t label = p.labels[row];
  for_each_vector(p.cols, [&](int64_t column, auto extent) {
    const Vec v = x(column, extent);
    const Vec softmax = exp(z.less(logsumexp, v));
    Vec dz = mask(fma(softmax, broadcast(dlogsumexp), broadcast(dtotal)), column, extent, 0);
    // Here and not after the row, since a store beside one past the caches waits for it.
    if (label >= column && label < column + W) dz = add_to_lane(dz, label - column, dlabel_logit);
    dx(column, z.grad(dz, v), extent);
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
}  // namespace jaxnorm::cpu
