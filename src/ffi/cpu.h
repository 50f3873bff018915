// The platform CPU of the table of handlers.
#pragma once

#include <initializer_list>
#include <new>
#include <string>

#include "engine/cpu/launch.h"
#include "ffi/parallel_for.h"
#include "ffi/table.h"

namespace jaxnorm {

namespace cpu {

// The threads of a call.
struct Threads {
  ffi::ThreadPool& pool;
  void operator()(int64_t count, const std::function<void(int64_t)>& task) const { parallel_for(pool, count, task); }
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
