// The launches of rotary embedding with the norms of queries and keys.
#include <cstring>

#include "engine/cpu/f32_weight.h"
#include "engine/cpu/grad_tasks.h"
#include "engine/cpu/isa.h"
#include "ops/qk_norm_rotary/cpu.h"

namespace jaxnorm::cpu {
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

}  // namespace jaxnorm::cpu
