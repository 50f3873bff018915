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
  void operator()(int64_t row, Stats stats, RowReader<X> x) const {
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

// The gradient of one row, but for its label's column.
template <class Z>
struct LogitGrad {
  Z z;
  float logsumexp, dlogsumexp, dtotal;

  Vec softmax(Vec x) const { return exp_of_negative(z(x) - logsumexp); }
  Vec operator()(Vec x) const { return fma(softmax(x), broadcast(dlogsumexp), broadcast(dtotal)); }
};

template <class X, class Z>
[[gnu::noinline]] void cross_entropy_grad_row(const CrossEntropyBackward& p, Z z, int64_t row, RowReader<X> x,
                                              RowWriter<X> dx) {
  const RowMask mask(p.mask, row, p.cols);
  const LogitGrad<Z> grad{z, p.logsumexp[row], p.dlogsumexp[row], p.dtotal ? p.dtotal[row] : 0};
  const int32_t label = p.labels[row];
  const bool has_label = p.dlabel_logit && names_column(p, label);
  // dx may lie where x does, so the label's column is read before the row is written.
  Vec label_dx;
  if (has_label) {
    const Vec label_x = load(x.data + label, Part{1});
    label_dx = ((mask.counts(label) ? grad(label_x) : Vec{}) + p.dlabel_logit[row]) * z.slope(label_x);
  }
  for_each_vector(p.cols, [&](int64_t column, auto extent) {
    const Vec v = x(column, extent);
    dx(column, mask(grad(v) * z.slope(v), column, extent, 0), extent);
  });
  if (has_label) store(dx.data + label, label_dx, Part{1});
}

void cross_entropy_grad(const CrossEntropyBackward& p, int64_t begin, int64_t end, int64_t traffic) {
  with_type(p.x.dtype, [&](auto x_type) {
    with_logits(p, [&](auto z) {
      using X = decltype(x_type);
      const InputRows<X> x(p.x, p.cols, traffic);
      const OutputRows<X> dx(p.dx, p.cols, p.dx.data == p.x.data ? 0 : traffic);
      for (int64_t row = begin; row < end; ++row) cross_entropy_grad_row<X>(p, z, row, x.reader(row), dx[row]);
    });
  });
  fence();
}

}  // namespace
}  // namespace jaxnorm::cpu
