// The module jaxnorm._cpu: XLA FFI handlers of the CPU kernels.
#include <nanobind/nanobind.h>

#include <initializer_list>
#include <new>

#include "cpu/launch.h"
#include "ffi/handlers.h"
#include "ffi/parallel_for.h"

namespace jaxnorm {
namespace {

struct Cpu {
  using Context = ffi::ThreadPool;
  static constexpr std::initializer_list<ffi::Traits> kTraits = {};
  static const Workspaces* workspaces() { return nullptr; }

  static ffi::Error run(const Forward& f, ffi::ThreadPool& pool) { return run(cpu::forward, f, pool); }
  static ffi::Error run(const Backward& b, ffi::ThreadPool& pool) { return run(cpu::backward, b, pool); }

 private:
  template <class Arguments>
  static ffi::Error run(void (*kernel)(const Arguments&, const cpu::ParallelFor&), const Arguments& arguments,
                        ffi::ThreadPool& pool) {
    try {
      kernel(arguments,
             [&](int64_t count, const std::function<void(int64_t)>& task) { parallel_for(pool, count, task); });
    } catch (const std::bad_alloc&) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxnorm: no memory for the sums over rows");
    }
    return ffi::Error::Success();
  }
};

}  // namespace
}  // namespace jaxnorm

NB_MODULE(_cpu, module) {
  module.def("handlers", &jaxnorm::handlers<jaxnorm::Cpu>, "The XLA FFI handlers, by target name.");
  module.def("isa", &jaxnorm::cpu::isa, "The instruction set of the kernels that this processor runs.");
}
