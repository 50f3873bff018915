// The platform CPU of the table of handlers.
#pragma once

#include <initializer_list>
#include <new>
#include <string>

#include "cpu/ops.h"
#include "ffi/parallel_for.h"
#include "ffi/table.h"

namespace jaxnorm {

// An op is run by run(op, parallel_for), in jaxnorm::cpu or beside the op's struct.
struct Cpu {
  using Context = ffi::ThreadPool;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};

  template <class Op>
  static ffi::Error run(const char* target, const Op& op, ffi::ThreadPool& pool) {
    using cpu::run;
    const auto on_pool = [&](int64_t count, const std::function<void(int64_t)>& task) {
      parallel_for(pool, count, task);
    };
    try {
      run(op, on_pool);
    } catch (const std::bad_alloc&) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                        std::string(target) + ": no memory for weights, for rows or for sums over them");
    }
    return ffi::Error::Success();
  }
};

}  // namespace jaxnorm
