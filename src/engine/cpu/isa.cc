// The instruction set of this processor.
#include "engine/cpu/isa.h"

namespace jaxnorm::cpu {
namespace {

Isa choose() {
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (has_avx2 && has_avx512) return Isa::avx512;
  if (has_avx2) return Isa::avx2;
#endif
  return Isa::baseline;
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

const char* isa_name() { return isa() == Isa::avx512 ? "avx512" : isa() == Isa::avx2 ? "avx2" : "baseline"; }

}  // namespace jaxnorm::cpu
