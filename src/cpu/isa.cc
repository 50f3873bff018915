// The kernels for one instruction set: compiled once for each, under the name JAXNORM_ISA.
#include "cpu/gated.h"
#include "cpu/kernels.h"
#include "cpu/quantize.h"
#include "cpu/row.h"
#include "cpu/types.h"

namespace jaxnorm::cpu {
namespace {

template <class F>
void with_quantized_type(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f8e4m3fn:
      return f(F8E4M3FN{});
    case Dtype::f8e5m2:
      return f(F8E5M2{});
    default:
      return f(S8{});
  }
}

// A row whose sums are over sooner than their horizontal additions, root and quotient goes with three others, so that
// these wait together. It has one accumulator for each sum then, whatever rows are beside it.
constexpr int64_t kShort = 512;
constexpr int kTogether = kChains;
static_assert(kTogether * kShort <= kGatedCols);

void save(const Rms& stats, const Forward& f, int64_t row) { f.rstd[row] = stats.rstd; }
void save(const Layer& stats, const Forward& f, int64_t row) {
  f.mean[row] = stats.mean;
  f.rstd[row] = stats.rstd;
}

// Writes the sum of rows [first, first + count), which are normalised next and read from the cache then. It may lie
// where the residual did: each vector of that is read before it is written.
void add_rows(const Forward& f, int64_t first, int64_t count) {
  with_types(f.x.dtype, f.residual.dtype, [&](auto x_type, auto sum_type) {
    using Sum = decltype(sum_type);
    const auto* const x = static_cast<const decltype(x_type)*>(f.x.data) + first * f.cols;
    const auto* const residual = static_cast<const Sum*>(f.residual.data) + first * f.cols;
    auto* const sum = static_cast<Sum*>(f.sum.data) + first * f.cols;
    for_each_vector(count * f.cols, [&](int64_t i, auto extent) {
      store(sum + i, load(x + i, extent) + load(residual + i, extent), extent);
    });
  });
}

// The weights of a forward, and of a quantisation the factors that smooth.
struct Weights {
  Weight scale, bias, smooth;

  explicit Weights(const Forward& f)
      : scale{static_cast<const float*>(f.scale.data), 1},
        bias{static_cast<const float*>(f.bias.data), -0.f},
        smooth{static_cast<const float*>(f.quantized.smooth.data), 1} {}

  template <class Extent>
  Vec y(Vec x_hat, int64_t column, Extent extent) const {
    return fma(x_hat, scale(column, extent), bias(column, extent));
  }
};

// An epilogue: writes y.
template <class Y>
struct Write {
  Weights weights;
  Result<Y> y;
  bool round_x_hat;

  Write(const Forward& f, int64_t traffic)
      : weights(f),
        y{static_cast<Y*>(f.y.data), is_streamed(traffic, f.y, f.cols + f.y_pad)},
        round_x_hat(!f.multiply_before_cast) {}

  template <class Stats, class X>
  void operator()(const Forward& f, int64_t row, Stats stats, LastPass<X> x) const {
    const Result<Y> of_row{y.data + row * (f.cols + f.y_pad), y.past_caches};
    const int64_t begin = weights_of(f.weight_rows, row, f.cols);
    for_each_vector(f.cols, [&](int64_t column, auto extent) {
      Vec value = stats.x_hat(x(column, extent));
      if (round_x_hat) value = rounded_to(value, Y{});
      of_row(column, weights.y(value, begin + column, extent), extent);
    });
  }
};

void write_padding(const Forward& f, int64_t begin, int64_t end) {
  const int64_t size = size_of(f.y.dtype);
  for (int64_t row = begin; row < end; ++row) {
    memset(static_cast<char*>(f.y.data) + ((row + 1) * (f.cols + f.y_pad) - f.y_pad) * size, 0, f.y_pad * size);
  }
}

// An epilogue: writes y quantised.
template <class Q>
struct Quantize {
  Weights weights;

  explicit Quantize(const Forward& f) : weights(f) {}

  template <class Stats, class X>
  void operator()(const Forward& f, int64_t row, Stats stats, LastPass<X> last_x) const {
    const auto v = [&](LastPass<X> x, int64_t column, auto extent) {
      return weights.y(stats.x_hat(x(column, extent)), column, extent) * weights.smooth(column, extent);
    };
    const LastPass<X> x{last_x.data, 0};
    for (int64_t begin = 0; begin < f.cols; begin += f.quantized.group) {
      quantize(f.quantized, row, f.cols, begin, v, x, last_x, Q{});
    }
  }
};

// Normalises rows [first, first + count) of `input`, of which there are R at most.
template <int R, class Stats, class X, class Epilogue>
void forward_rows(const Forward& f, Input input, int64_t first, int64_t count, int64_t ahead, Epilogue epilogue) {
  const Rows<R, X> rows(input, f.cols, first, count);
  Stats stats[R];
  Stats::template of<R>(rows, f.cols, f.epsilon, stats);
  for (int64_t row = 0; row < count; ++row) {
    const Stats of_row = stats[row];
    if (f.rstd) save(of_row, f, first + row);
    epilogue(f, first + row, of_row, LastPass<X>{rows.data[row], ahead});
  }
}

void saved(const Backward& b, int64_t row, Rms* stats) { *stats = {b.rstd[row]}; }
void saved(const Backward& b, int64_t row, Layer* stats) { *stats = {b.mean[row], b.rstd[row], -0.f}; }

template <class Stats, class X, class Dy>
void backward_row(const Backward& b, int64_t row, float* dscale, float* dbias, int64_t traffic) {
  const Rows<1, X> x_row(b.x, b.cols, row, 1);
  const Rows<1, Dy> dy_row(b.dy, b.cols + b.dy_pad, row, 1);
  const Weight scale{static_cast<const float*>(b.scale.data), 1};
  const int64_t begin = weights_of(b.weight_rows, row, b.cols);
  Stats stats;
  saved(b, row, &stats);

  float mean_g = 0, mean_gx = 0;
  if (b.dx) {
    const auto total = sum<1, 2>(b.cols, [&](int, int64_t column, auto extent, Vec* sums) {
      const Vec g = dy_row(0, column, extent) * scale(begin + column, extent);
      if (Stats::centred) sums[0] += g;
      // Past the row's end x_hat is that of x = 0, which may be infinite.
      sums[1] = fma(g, within(stats.x_hat(x_row(0, column, extent)), extent), sums[1]);
    });
    mean_g = total.mean(0, 0);
    mean_gx = total.mean(0, 1);
  }
  const LastPass<X> x{x_row.data[0], elements_ahead(traffic, b.cols, sizeof(X))};
  const LastPass<Dy> dy{dy_row.data[0], elements_ahead(traffic, b.cols + b.dy_pad, sizeof(Dy))};
  const X* const dsum = b.dsum ? static_cast<const X*>(b.dsum.data) + row * b.cols : nullptr;
  const Result<X> dx{static_cast<X*>(b.dx.data) + (b.dx ? row * b.cols : 0), is_streamed(traffic, b.dx, b.cols)};
  for_each_vector(b.cols, [&](int64_t column, auto extent) {
    const Vec d = dy(column, extent);
    const Vec x_hat = stats.x_hat(x(column, extent));
    if (b.dx) {
      Vec g = d * scale(begin + column, extent);
      if (Stats::centred) g -= mean_g;
      Vec value = fma(x_hat, broadcast(-mean_gx), g) * stats.rstd;
      if (dsum) value += load(dsum + column, extent);
      dx(column, value, extent);
    }
    const int64_t i = begin + column;
    if (dscale) store(dscale + i, fma(d, x_hat, load(dscale + i, extent)), extent);
    if (dbias) store(dbias + i, d + load(dbias + i, extent), extent);
  });
}

template <int R, class Stats, class X, class Epilogue>
void forward_by(const Forward& f, Input input, int64_t begin, int64_t end, int64_t traffic, Epilogue epilogue) {
  const int64_t ahead = elements_ahead(traffic, R * f.cols, sizeof(X));
  for (int64_t row = begin; row < end; row += R) {
    const int64_t count = end - row < R ? end - row : R;
    if (f.residual) add_rows(f, row, count);
    forward_rows<R, Stats, X>(f, input, row, count, ahead, epilogue);
  }
}

template <int R, class Stats>
void forward_by(const Forward& f, int64_t begin, int64_t end, int64_t traffic) {
  const Input input = f.residual ? Input{f.sum.data, f.sum.dtype} : f.x;
  if (f.quantized.values) {
    with_type(input.dtype, [&](auto x) {
      with_quantized_type(f.quantized.values.dtype, [&](auto q) {
        forward_by<R, Stats, decltype(x)>(f, input, begin, end, traffic, Quantize<decltype(q)>(f));
      });
    });
  } else {
    with_types(input.dtype, f.y.dtype, [&](auto x, auto y) {
      forward_by<R, Stats, decltype(x)>(f, input, begin, end, traffic, Write<decltype(y)>(f, traffic));
    });
    if (f.y_pad) write_padding(f, begin, end);
  }
  fence();
}

template <class Stats>
void forward_of(const Forward& f, int64_t begin, int64_t end, int64_t traffic) {
  (f.cols <= kShort ? forward_by<kTogether, Stats> : forward_by<1, Stats>)(f, begin, end, traffic);
}

template <class Stats>
void backward_of(const Backward& b, int64_t begin, int64_t end, float* dscale, float* dbias, int64_t traffic) {
  with_types(b.x.dtype, b.dy.dtype, [&](auto x, auto dy) {
    for (int64_t row = begin; row < end; ++row) {
      backward_row<Stats, decltype(x), decltype(dy)>(b, row, dscale, dbias, traffic);
    }
  });
  fence();
}

void forward(const Forward& f, int64_t begin, int64_t end, int64_t traffic) {
  if (f.gate) return (f.cols <= kShort ? gated_forward<kTogether> : gated_forward<1>)(f, begin, end, traffic);
  (f.kind == Kind::rms ? forward_of<Rms> : forward_of<Layer>)(f, begin, end, traffic);
}

void backward(const Backward& b, int64_t begin, int64_t end, float* dscale, float* dbias, int64_t traffic) {
  if (b.gate) return gated_backward(b, begin, end, dscale, traffic);
  (b.kind == Kind::rms ? backward_of<Rms> : backward_of<Layer>)(b, begin, end, dscale, dbias, traffic);
}

void add(const float* from, float* into, int64_t count) {
  for_each_vector(count, [&](int64_t column, auto extent) {
    store(into + column, load(into + column, extent) + load(from + column, extent), extent);
  });
}

void cast(const float* from, Output into, int64_t count) {
  with_type(into.dtype, [&](auto type) {
    auto* const out = static_cast<decltype(type)*>(into.data);
    for_each_vector(count,
                    [&](int64_t column, auto extent) { store(out + column, load(from + column, extent), extent); });
  });
}

void widen(Input from, float offset, float* into, int64_t count) {
  with_type(from.dtype, [&](auto type) {
    const auto* const in = static_cast<const decltype(type)*>(from.data);
    for_each_vector(
        count, [&](int64_t column, auto extent) { store(into + column, load(in + column, extent) + offset, extent); });
  });
}

}  // namespace

extern const Kernels JAXNORM_ISA = {JAXNORM_ISA_NAME, forward, backward, add, cast, widen};

}  // namespace jaxnorm::cpu
