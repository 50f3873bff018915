// Which kernels this processor runs.
#include "cpu/kernels.h"

#include "cpu/ops.h"

namespace jaxnorm::cpu {
namespace {

const Kernels& choose() {
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (has_avx2 && has_avx512) return avx512;
  if (has_avx2) return avx2;
#endif
  return baseline;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

const char* isa() { return kernels().isa; }

}  // namespace jaxnorm::cpu
