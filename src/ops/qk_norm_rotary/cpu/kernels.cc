// The rows of queries and keys, normalised and turned, and their launches.
//
// Tokens go by blocks, for which cosines and sines are computed once for all heads. Rows that lie side by side, those
// of one token or of one head, are a run: the loops over rows are the engine's.
#include <cstring>

#include "engine/cpu/launch.h"
#include "ops/norm/cpu/norm_rows.h"
#include "ops/qk_norm_rotary/call.h"

namespace jaxnorm::cpu {

// Of all heads of tokens [begin, end); scales, their gradients and `traffic` as those of the norms.
struct QkNormRotaryKernels {
  static const QkNormRotaryKernels baseline, avx2, avx512;

  void (*forward)(const QkNormRotaryForward& p, int64_t begin, int64_t end, int64_t traffic);
  void (*backward)(const QkNormRotaryBackward& p, int64_t begin, int64_t end, float* dq_scale, float* dk_scale,
                   int64_t traffic);
};

namespace {

typedef double Wide __attribute__((vector_size(8 * W)));
typedef int64_t WideInts __attribute__((vector_size(8 * W)));

// Sine and cosine of float32 angles to about 1 ulp, however large.
struct SinCos {
  Vec sin, cos;
};

// Those of one lane after the other, by the C library, which reduces any angle exactly.
SinCos sincos_by_lane(Vec angle) {
  SinCos result;
  for (int i = 0; i < W; ++i) {
    result.sin[i] = static_cast<float>(__builtin_sin(angle[i]));
    result.cos[i] = static_cast<float>(__builtin_cos(angle[i]));
  }
  return result;
}

// In float64, so that the reduction to [-pi/4, pi/4] loses nothing. Pi/2 is in two parts, of which the first has 33
// bits: its product with a quadrant below 2^20 is exact.
SinCos sincos_of(Vec angle) {
  constexpr float kLargest = 1 << 20;
  const Bits magnitude = (Bits)angle & 0x7fffffffu, most = (Bits)broadcast(kLargest);
  const auto are_large = magnitude > most;
  for (int i = 0; i < W; ++i)
    if (are_large[i]) return sincos_by_lane(angle);

  constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1, kHalfPi = 0x1.921fb544p0, kHalfPiRest = 0x1.0b4611a626331p-34;
  constexpr double kShift = 0x1.8p52;  // adding it leaves the rounded number in the last bits
  const Wide a = __builtin_convertvector(angle, Wide);
  const Wide shifted = a * kTwoOverPi + kShift, quadrant = shifted - kShift;
  const Wide r = (a - quadrant * kHalfPi) - quadrant * kHalfPiRest, r2 = r * r;
  // The series, of which the first terms left out are below 2^-37.
  constexpr double kSin[] = {1. / 362880, -1. / 5040, 1. / 120, -1. / 6};
  constexpr double kCos[] = {-1. / 3628800, 1. / 40320, -1. / 720, 1. / 24, -1. / 2};
  Wide s = Wide{} - 1. / 39916800, c = Wide{} + 1. / 479001600;
  for (const double coefficient : kSin) s = s * r2 + coefficient;
  for (const double coefficient : kCos) c = c * r2 + coefficient;
  s = s * r2 * r + r;
  c = c * r2 + 1;
  const Vec sin_r = __builtin_convertvector(s, Vec), cos_r = __builtin_convertvector(c, Vec);

  const Bits turns = __builtin_convertvector((WideInts)shifted, Bits);
  const auto is_odd = (turns & 1) != 0;
  const Bits sin_sign = (turns & 2) << 30, cos_sign = ((turns + 1) & 2) << 30;
  return {(Vec)((Bits)(is_odd ? cos_r : sin_r) ^ sin_sign), (Vec)((Bits)(is_odd ? sin_r : cos_r) ^ cos_sign)};
}

// What turns the rows of a block of tokens. A token has `width` cosines and then as many sines: one of each pair or, of
// interleaved pairs, one of each column, the sine of a first column negative. `back`: turned by the negative angles.
class Turns {
 public:
  Turns(const Rotation& rotation, bool back)
      : rotation_(rotation), width_(rotation.interleaved ? rotation.dim : rotation.dim / 2), back_(back) {}

  int64_t tokens() const { return kFloats / step(); }
  int64_t step() const { return 2 * width_; }  // from a token's to the next one's
  const float* of_first() const { return data_; }

  void fill(int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) fill(row_of(token), data_ + (token - begin) * step());
  }

 private:
  static constexpr int64_t kFloats = 1 << 13;
  static_assert(kFloats >= 2 * kRotaryCols);

  int64_t row_of(int64_t token) const {
    const auto row = [&](const RowMap& map) { return token / map.inner % map.count; };
    return row(rotation_.token_rows.outer) * rotation_.token_rows.inner.count + row(rotation_.token_rows.inner);
  }

  void fill(int64_t row, float* to) const {
    const int64_t half = rotation_.dim / 2;
    float pairs[2][kRotaryCols / 2];
    float *const cos = rotation_.interleaved ? pairs[0] : to, *const sin = rotation_.interleaved ? pairs[1] : to + half;
    const Vec sign = broadcast(back_ ? -1 : 1);
    for_each_vector(half, [&](int64_t i, auto extent) {
      SinCos turn;
      if (rotation_.positions) {
        turn = sincos_of(load(rotation_.frequencies + i, extent) * rotation_.positions[row]);
      } else {
        turn = {load(rotation_.sin + row * half + i, extent), load(rotation_.cos + row * half + i, extent)};
      }
      store(cos + i, turn.cos, extent);
      store(sin + i, turn.sin * sign, extent);
    });
    if (!rotation_.interleaved) return;
    for (int64_t i = 0; i < half; ++i) {
      to[2 * i] = to[2 * i + 1] = cos[i];
      to[width_ + 2 * i] = -sin[i];
      to[width_ + 2 * i + 1] = sin[i];
    }
  }

  const Rotation& rotation_;
  const int64_t width_;
  const bool back_;
  float data_[kFloats];
};

// Each lane's neighbour of a pair.
Vec swapped(Vec v) {
  typedef uint64_t Pairs __attribute__((vector_size(4 * W)));
  const Pairs pairs = (Pairs)v;
  return (Vec)(pairs << 32 | pairs >> 32);
}

// Writes a row y, of which h(column, extent) is what is turned; `turns` are its token's.
template <class H, class Y>
[[gnu::always_inline]] inline void write_turned(const Rotation& rotation, int64_t cols, const float* turns, H h, Y y) {
  const int64_t dim = rotation.dim, half = dim / 2;
  if (rotation.interleaved) {
    for_each_vector(dim, [&](int64_t i, auto extent) {
      const Vec v = h(i, extent);
      y(i, fma(v, load(turns + i, extent), swapped(v) * load(turns + dim + i, extent)), extent);
    });
  } else {
    for_each_vector(half, [&](int64_t i, auto extent) {
      const Vec a = h(i, extent), b = h(half + i, extent);
      const Vec cos = load(turns + i, extent), sin = load(turns + half + i, extent);
      y(i, fma(a, cos, -(b * sin)), extent);
      y(half + i, fma(b, cos, a * sin), extent);
    });
  }
  for_each_vector(cols - dim, [&](int64_t i, auto extent) { y(dim + i, h(dim + i, extent), extent); });
}

// Rows [first, first + count) of q or k; in x, which may be packed, they lie `x_further` rows further. Of each, which
// is one further: its turns, and its row of the scale.
struct Run {
  int64_t first, count, x_further;
  const float* turns;
  int64_t turns_step, scale_begin, scale_step;
};

// Calls run(Run) for all rows of tokens [begin, end), whose turns these are. `rows`: of a token; of x `x_more` more.
template <class P, class Of, class F>
void for_each_run(const P& p, const Of& of, int64_t rows, const Turns& turns, int64_t begin, int64_t end, F run) {
  const int64_t heads = of.heads, x_more = of.x_rows - rows, inner = rows == 1 && x_more == 0 ? p.tokens : p.inner,
                scale_step = of.has_scale_per_head ? p.cols : 0;
  if (inner == 1) {
    for (int64_t token = begin; token < end; ++token) {
      const float* const of_token = turns.of_first() + (token - begin) * turns.step();
      run(Run{token * rows, heads, token * x_more, of_token, 0, 0, scale_step});
    }
    return;
  }
  for (int64_t token = begin, count; token < end; token += count) {
    const int64_t left = inner - token % inner, outer = token / inner;
    count = left < end - token ? left : end - token;
    const float* const of_token = turns.of_first() + (token - begin) * turns.step();
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t first = (outer * rows + head) * inner + token % inner;
      run(Run{first, count, outer * x_more * inner, of_token, turns.step(), head * scale_step, 0});
    }
  }
}

// The statistics of rows without a norm.
struct Unnormed {
  Vec x_hat(Vec x) const { return x; }

  template <int R, class Rows, class Op>
  static void of(const Rows&, const Op&, Unnormed*) {}
  template <class Op>
  void save(const Op&, int64_t) const {}
};

// Calls f(Stats{}).
template <class F>
void with_head_norm(HeadNorm norm, F f) {
  if (norm == HeadNorm::none) return f(Unnormed{});
  norm == HeadNorm::rms ? f(Rms{}) : f(Layer{});
}

// Rows of a result that is turned. They may go past the caches if each half of what is turned is in whole vectors.
template <class X>
OutputRows<X> turned_rows(Output y, int64_t cols, const Rotation& rotation, int64_t traffic) {
  const bool whole = rotation.dim % (rotation.interleaved ? W : 2 * W) == 0;
  return OutputRows<X>(y, cols, whole ? traffic : 0);
}

// Of q or k what the loop over rows asks for.
struct HeadRows {
  int64_t cols;
  float epsilon;
  float *mean, *rstd;
};

// An epilogue: writes the rows of a run.
template <class X>
struct WriteTurned {
  const Rotation& rotation;
  int64_t cols;
  Input scale;
  OutputRows<X> y;
  Run run;

  template <class Stats>
  void operator()(int64_t row, Stats stats, RowReader<X> x) const {
    const Weight weight(scale, 1, run.scale_begin + (row - run.first) * run.scale_step);
    write_turned(
        rotation, cols, run.turns + (row - run.first) * run.turns_step,
        [&](int64_t column, auto extent) { return stats.x_hat(x(column, extent)) * weight(column, extent); }, y[row]);
  }
};

// Calls f(first, last) for blocks of tokens [begin, end), once `turns` has theirs.
template <class F>
void for_each_turned_block(Turns& turns, int64_t begin, int64_t end, F f) {
  for (int64_t first = begin, last; first < end; first = last) {
    last = end - first < turns.tokens() ? end : first + turns.tokens();
    turns.fill(first, last);
    f(first, last);
  }
  fence();
}

void qk_norm_rotary(const QkNormRotaryForward& p, int64_t begin, int64_t end, int64_t traffic) {
  Turns turns(p.rotation, false);
  with_head_norm(p.norm, [&](auto stats) {
    with_type(p.q.x.dtype, [&](auto x_type) {
      using X = decltype(x_type);
      for_each_turned_block(turns, begin, end, [&](int64_t first, int64_t last) {
        const auto run_heads = [&](const Heads& of) {
          const HeadRows rows{p.cols, p.epsilon, of.mean, of.rstd};
          const OutputRows<X> y = turned_rows<X>(of.y, p.cols, p.rotation, traffic);
          for_each_run(p, of, of.y_rows, turns, first, last, [&](const Run& run) {
            const WriteTurned<X> write{p.rotation, p.cols, of.scale, y, run};
            const Stored<X> load{{InputRows<X>(of.x, p.cols)[run.x_further], of.x.dtype}, p.cols};
            for_rows<kTogether, decltype(stats)>(rows, run.first, run.first + run.count, traffic, load, write);
          });
        };
        run_heads(p.q);
        run_heads(p.k);
      });
    });
  });
}

// The gradient of a run's rows. A row of dy is turned back before its sums are made, and kept meanwhile.
template <class X>
struct TurnedGrad {
  const QkNormRotaryBackward& p;
  const HeadsGrad& of;
  Run run;
  float *dscale, *kept;
  InputRows<X> dy, x;
  OutputRows<X> dx;

  TurnedGrad(const QkNormRotaryBackward& p, const HeadsGrad& of, const Run& run, float* dscale, float* kept,
             int64_t traffic)
      : p(p),
        of(of),
        run(run),
        dscale(dscale),
        kept(kept),
        dy(of.dy, p.cols, traffic),
        x(of.x, p.cols, traffic),
        dx(of.dx, p.cols, traffic) {}

  template <class Y>
  void turn_back(int64_t row, Y y) const {
    const RowReader<X> dy_row = dy.reader(row);
    write_turned(
        p.rotation, p.cols, run.turns + (row - run.first) * run.turns_step,
        [&](int64_t column, auto extent) { return dy_row(column, extent); }, y);
  }

  DyAndX<float, X> operands(int64_t row) const {
    turn_back(row, RowWriter<float>{kept, false});
    return {{kept, 0}, x.reader(row + run.x_further)};
  }
  WriteDx<X> result(int64_t row) const { return {dx[row + run.x_further]}; }
  GradWeights weights(int64_t row) const {
    const int64_t begin = run.scale_begin + (row - run.first) * run.scale_step;
    return {Weight(of.scale, 1, begin), dscale ? dscale + begin : nullptr, nullptr};
  }
};

// Of q or k what Stats::saved and the loop over rows ask for.
struct HeadGradRows {
  int64_t cols;
  const float *mean, *rstd;
};

template <class Stats, class X>
void run_grad(const QkNormRotaryBackward& p, const HeadsGrad& of, const Run& run, float* dscale, int64_t traffic) {
  float kept[kRotaryCols];
  TurnedGrad<X> grad(p, of, run, dscale, kept, traffic);
  const HeadGradRows rows{p.cols, of.mean, of.rstd};
  if constexpr (__is_same(Stats, Unnormed)) grad.dx = turned_rows<X>(of.dx, p.cols, p.rotation, traffic);
  for (int64_t row = run.first; row < run.first + run.count; ++row) {
    if constexpr (__is_same(Stats, Unnormed)) {
      grad.turn_back(row, grad.dx[row + run.x_further]);
    } else {
      grad_row<Stats>(rows, grad, row);
    }
  }
}

// The sums are of the scales' shapes.
void qk_norm_rotary_grad(const QkNormRotaryBackward& p, int64_t begin, int64_t end, float* dq_scale, float* dk_scale,
                         int64_t traffic) {
  Turns turns(p.rotation, true);
  with_head_norm(p.norm, [&](auto stats) {
    with_type(p.q.dy.dtype, [&](auto x_type) {
      for_each_turned_block(turns, begin, end, [&](int64_t first, int64_t last) {
        const auto run_heads = [&](const HeadsGrad& of, float* dscale) {
          if (!of.dx && !dscale) return;
          for_each_run(p, of, of.heads, turns, first, last, [&](const Run& run) {
            run_grad<decltype(stats), decltype(x_type)>(p, of, run, dscale, traffic);
          });
        };
        run_heads(p.q, dq_scale);
        run_heads(p.k, dk_scale);
      });
    });
  });
}

}  // namespace

const QkNormRotaryKernels QkNormRotaryKernels::JAXNORM_ISA = {cpu::qk_norm_rotary, cpu::qk_norm_rotary_grad};

#ifdef JAXNORM_ONCE
namespace {

template <class P, class Of>
int64_t scale_elements(const P& p, const Of& of) {
  return (of.has_scale_per_head ? of.heads : 1) * p.cols;
}

// Of q and k, by which tokens are shared out: v changes no sum.
template <class P>
int64_t elements_of_token(const P& p) {
  return std::max<int64_t>(1, (p.q.heads + p.k.heads) * p.cols);
}

// How many bytes are read and written, by so many arrays of q and of k.
template <class P>
int64_t traffic_of(const P& p, int64_t arrays, Dtype dtype) {
  const int64_t elements = arrays * elements_of_token(p) + (p.v.y ? 2 * p.k.heads * p.cols : 0);
  return p.tokens * elements * size_of(dtype);
}

// Of an array that has so many rows of a token, this part's `heads` among them.
template <class P>
void expect_heads(const P& p, Output y, int64_t rows, int64_t heads) {
  if (p.tokens > 0) expect_writes(y, ((p.tokens - 1) * rows + heads) * p.cols);
}

template <class P>
void copy_values(const P& p, int64_t begin, int64_t end) {
  if (!p.v.y) return;
  const int64_t row = p.cols * size_of(p.v.y.dtype), bytes = p.k.heads * row;
  const auto* const from = static_cast<const char*>(p.v.x.data);
  auto* const to = static_cast<char*>(p.v.y.data);
  for (int64_t token = begin; token < end; ++token) {
    if (from) {
      std::memcpy(to + token * p.v.y_rows * row, from + token * p.v.x_rows * row, bytes);
    } else {
      std::memset(to + token * p.v.y_rows * row, 0, bytes);
    }
  }
}

}  // namespace

void run(const QkNormRotaryForward& call, const ParallelFor& parallel_for) {
  QkNormRotaryForward p = call;
  const F32Weight q_scale(&p.q.scale, p.scale_offset, scale_elements(p, p.q), parallel_for);
  const F32Weight k_scale(&p.k.scale, p.scale_offset, scale_elements(p, p.k), parallel_for);
  const int64_t traffic = traffic_of(p, 2, p.q.x.dtype);
  for (const Heads* of : {&p.q, &p.k}) expect_heads(p, of->y, of->y_rows, of->heads);
  expect_heads(p, p.v.y, p.v.y_rows, p.k.heads);
  // Where neighbouring tokens are neighbours in memory, a task has some.
  const int64_t least = p.inner == 1 ? 1 : 16;
  for_each_block(parallel_for, p.tokens, std::max(least, kTaskElements / elements_of_token(p)),
                 [&](int64_t begin, int64_t end) {
                   kernels<QkNormRotaryKernels>().forward(p, begin, end, traffic);
                   copy_values(p, begin, end);
                 });
}

void run(const QkNormRotaryBackward& call, const ParallelFor& parallel_for) {
  QkNormRotaryBackward p = call;
  const F32Weight q_scale(&p.q.scale, p.scale_offset, scale_elements(p, p.q), parallel_for);
  const F32Weight k_scale(&p.k.scale, p.scale_offset, scale_elements(p, p.k), parallel_for);
  const int64_t traffic = traffic_of(p, 3, p.q.dy.dtype);
  for (const HeadsGrad* of : {&p.q, &p.k}) expect_heads(p, of->dx, of->x_rows, of->heads);
  expect_heads(p, p.v.y, p.v.y_rows, p.k.heads);
  // Tasks are of tokens, as if each were a row. A sum has as many terms as a task has heads, so that more heads than
  // 128 count as longer rows.
  const int64_t cols = std::max(elements_of_token(p), 256 * std::max(p.q.heads, p.k.heads));
  const GradTasks tasks(p.tokens, cols, {}, /*with_sums=*/p.q.dscale || p.k.dscale);
  WeightGrad dq_scale(p.q.dscale, tasks, {}, scale_elements(p, p.q));
  WeightGrad dk_scale(p.k.dscale, tasks, {}, scale_elements(p, p.k));
  parallel_for(tasks.count(), [&](int64_t task) {
    float *const q_sums = dq_scale.zeroed(task), *const k_sums = dk_scale.zeroed(task);
    tasks.for_each_stretch(task, [&](int64_t begin, int64_t end) {
      kernels<QkNormRotaryKernels>().backward(p, begin, end, q_sums, k_sums, traffic);
      copy_values(p, begin, end);
    });
  });
  dq_scale.finish(parallel_for);
  dk_scale.finish(parallel_for);
}
#endif

}  // namespace jaxnorm::cpu
