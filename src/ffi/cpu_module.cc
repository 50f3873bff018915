// The module jaxnorm._cpu: XLA FFI handlers of the CPU kernels.
#include "cpu_ops.h"
#include "engine/cpu/launch.h"
#include "ffi/cpu.h"
#include "ffi/module.h"

NB_MODULE(_cpu, module) {
  jaxnorm::define<jaxnorm::Cpu, jaxnorm::kTable<jaxnorm::Cpu>>(module);
  module.def("isa", &jaxnorm::cpu::isa_name, "The instruction set of the kernels that this processor runs.");
}
