// How the rows of a call are shared out among threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>

#include "operands.h"
#include "platforms.h"

#if defined(__unix__)
#include <sys/mman.h>
#endif

namespace jaxnorm::cpu {

// The elements that are one task: enough to be worth handing to another thread.
inline constexpr int64_t kTaskElements = 1 << 15;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls task(begin, end) for blocks of `step` neighbours among `count`.
template <class Task>
void for_each_block(const ParallelFor& parallel_for, int64_t count, int64_t step, Task task) {
  parallel_for(ceil_div(count, step), [&](int64_t block) { task(block * step, std::min(count, (block + 1) * step)); });
}

template <class Task>
void for_each_block(const ParallelFor& parallel_for, int64_t count, Task task) {
  for_each_block(parallel_for, count, kTaskElements, task);
}

// Calls task(begin, end) for blocks of neighbouring rows.
template <class Task>
void for_each_rows(const ParallelFor& parallel_for, int64_t rows, int64_t cols, Task task) {
  for_each_block(parallel_for, rows, std::max<int64_t>(1, kTaskElements / cols), task);
}

// For tasks that allocate: that there is no memory is said by whoever handed them out, since a thread of a pool could
// only end the program.
inline ParallelFor for_tasks_that_allocate(const ParallelFor& parallel_for) {
  return [&](int64_t count, const std::function<void(int64_t)>& task) {
    std::atomic<bool> has_memory{true};
    parallel_for(count, [&](int64_t i) {
      try {
        task(i);
      } catch (const std::bad_alloc&) {
        has_memory = false;
      }
    });
    if (!has_memory) throw std::bad_alloc();
  };
}

// Room for what a task keeps of rows: on the heap, since a thread may have a small stack.
inline std::unique_ptr<float[]> room_for(int64_t floats) {
  return std::unique_ptr<float[]>(floats > 0 ? new float[floats] : nullptr);
}

// Room for one row at a time, or for the short ones that go together.
constexpr int64_t kShortFloats = 1 << 11;
inline int64_t floats_of_rows(int64_t cols) { return std::max(cols, kShortFloats); }

// Calls task(begin, end, room) for blocks of neighbouring rows, with room of so many floats.
template <class Task>
void for_each_rows_with_room(const ParallelFor& threads, int64_t rows, int64_t cols, int64_t floats, Task task) {
  for_each_rows(for_tasks_that_allocate(threads), rows, cols,
                [&](int64_t begin, int64_t end) { task(begin, end, room_for(floats).get()); });
}

// Asks for large pages under a large output. XLA hands it over untouched, and to fault it in by 4 KiB takes several
// times as long as to compute it. A refusal is no error.
inline void expect_writes([[maybe_unused]] Output output, [[maybe_unused]] int64_t elements) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 1 << 21;
  const uintptr_t data = reinterpret_cast<uintptr_t>(output.data);
  const uintptr_t begin = (data + kPage - 1) & -kPage;
  const uintptr_t end = (data + elements * size_of(output.dtype)) & -kPage;
  if (output && end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace jaxnorm::cpu
