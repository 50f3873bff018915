// The module jaxnorm._cpu: XLA FFI handlers of the CPU kernels.
#include "ffi/cpu.h"
#include "ffi/module.h"

NB_MODULE(_cpu, module) {
  using namespace jaxnorm;
  define(module, all_handlers<Cpu, kOps<NoWorkspaces>>);
  module.def("isa", &cpu::isa, "The instruction set of the kernels that this processor runs.");
}
