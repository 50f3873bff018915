// The module jaxnorm._cpu: XLA FFI handlers of the CPU kernels.
#include <nanobind/nanobind.h>

#include <new>

#include "cpu/launch.h"
#include "ffi/arguments.h"
#include "ffi/parallel_for.h"

namespace nb = nanobind;

namespace jaxnorm {
namespace {

template <class Arguments>
ffi::Error run(void (*kernel)(const Arguments&, const cpu::ParallelFor&), const ffi::ErrorOr<Arguments>& arguments,
               ffi::ThreadPool& pool) {
  if (!arguments) return arguments.error();
  try {
    kernel(*arguments,
           [&](int64_t count, const std::function<void(int64_t)>& task) { parallel_for(pool, count, task); });
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxnorm: no memory for the sums over rows");
  }
  return ffi::Error::Success();
}

template <Kind kind>
ffi::Error forward(ffi::RemainingArgs operands, ffi::RemainingRets results, ForwardAttributes attributes,
                   ffi::ThreadPool pool) {
  return run(cpu::forward, forward_arguments(kind, operands, results, attributes), pool);
}

template <Kind kind>
ffi::Error backward(ffi::RemainingArgs operands, ffi::RemainingRets results, BackwardAttributes attributes,
                    ffi::ThreadPool pool) {
  return run(cpu::backward, backward_arguments(kind, operands, results, attributes), pool);
}

XLA_FFI_DEFINE_HANDLER(rms_norm_fwd, forward<Kind::rms>, bind<ForwardAttributes>().Ctx<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER(layer_norm_fwd, forward<Kind::layer>, bind<ForwardAttributes>().Ctx<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER(rms_norm_bwd, backward<Kind::rms>, bind<BackwardAttributes>().Ctx<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER(layer_norm_bwd, backward<Kind::layer>, bind<BackwardAttributes>().Ctx<ffi::ThreadPool>());

nb::dict handlers() {
  nb::dict all;
  all["jaxnorm_rms_norm_fwd"] = nb::capsule(reinterpret_cast<void*>(rms_norm_fwd));
  all["jaxnorm_layer_norm_fwd"] = nb::capsule(reinterpret_cast<void*>(layer_norm_fwd));
  all["jaxnorm_rms_norm_bwd"] = nb::capsule(reinterpret_cast<void*>(rms_norm_bwd));
  all["jaxnorm_layer_norm_bwd"] = nb::capsule(reinterpret_cast<void*>(layer_norm_bwd));
  return all;
}

}  // namespace
}  // namespace jaxnorm

NB_MODULE(_cpu, module) {
  module.def("handlers", &jaxnorm::handlers, "The XLA FFI handlers, by target name.");
  module.def("isa", &jaxnorm::cpu::isa, "The instruction set of the kernels that this processor runs.");
}
