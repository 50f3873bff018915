// The rows of queries and keys, normalised and turned.
//
// Tokens go by blocks, for which cosines and sines are computed once for all heads. Rows that lie side by side, those
// of one token or of one head, are a run: the loops over rows are the engine's.
#include "ops/norm/cpu/norm_rows.h"
#include "ops/qk_norm_rotary/call.h"
#include "ops/qk_norm_rotary/cpu.h"
#include "ops/qk_norm_rotary/cpu/sincos.h"

namespace jaxnorm::cpu {
namespace {

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

}  // namespace jaxnorm::cpu
