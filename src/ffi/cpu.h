// The platform CPU of the table of handlers.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "engine/cpu/launch.h"
#include "ffi/table.h"

namespace jaxnorm {

namespace cpu {

// The threads of a call: a parallel loop on XLA's own thread pool.
//
// Caller and helpers draw tasks from one counter. The caller never waits for a helper to start, so this cannot deadlock
// when the pool has one thread or the caller is on it; a helper that starts late finds the counter spent and touches
// nothing else, the shared state being its own.
struct Threads {
  ffi::ThreadPool& pool;

  void operator()(int64_t count, const std::function<void(int64_t)>& task) const {
    struct State {
      const std::function<void(int64_t)>* task;
      int64_t count;
      std::atomic<int64_t> next{0}, finished{0};

      void work() {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
          (*task)(i);
          finished.fetch_add(1, std::memory_order_release);
        }
      }
    };

    const int64_t helpers = std::min(pool.num_threads(), count) - 1;
    if (helpers < 1) {
      for (int64_t i = 0; i < count; ++i) task(i);
      return;
    }
    const auto state = std::make_shared<State>();
    state->task = &task;
    state->count = count;
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule([state] { state->work(); });
    state->work();
    // Only the tasks that helpers are in the middle of are left: too short a wait to sleep.
    while (state->finished.load(std::memory_order_acquire) < count) std::this_thread::yield();
  }
};

}  // namespace cpu

// An op is run by run(op, parallel_for), in jaxnorm::cpu or beside the op's struct.
struct Cpu {
  static constexpr bool kIsCuda = false;
  using Context = ffi::ThreadPool;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};

  template <class Op>
  static ffi::Error call(const char* target, const Op& op, ffi::ThreadPool& pool) {
    try {
      run(op, cpu::Threads{pool});
    } catch (const std::bad_alloc&) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                        std::string(target) + ": no memory for weights, for rows or for sums over them");
    }
    return ffi::Error::Success();
  }

  // Kernels of the CPU keep nothing beside results.
  static constexpr WorkspaceFunction* workspace(WorkspaceFunction*) { return nullptr; }
};

}  // namespace jaxnorm
