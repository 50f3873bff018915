// The instruction set of this processor, and the kernels on arrays without rows.
#include "engine/cpu/launch.h"

#include "engine/cpu/columns.h"

namespace jaxnorm::cpu {
namespace {

void add(const float* from, float* into, int64_t count) {
  for_each_vector(
      count, [&](int64_t i, auto extent) { store(into + i, load(into + i, extent) + load(from + i, extent), extent); });
}

void cast(const float* from, Output into, int64_t count) {
  with_type(into.dtype, [&](auto type) {
    auto* const out = static_cast<decltype(type)*>(into.data);
    for_each_vector(count, [&](int64_t i, auto extent) { store(out + i, load(from + i, extent), extent); });
  });
}

void widen(Input from, float offset, float* into, int64_t count) {
  with_type(from.dtype, [&](auto type) {
    const auto* const in = static_cast<const decltype(type)*>(from.data);
    for_each_vector(count, [&](int64_t i, auto extent) { store(into + i, load(in + i, extent) + offset, extent); });
  });
}

}  // namespace

const ArrayKernels ArrayKernels::JAXNORM_ISA = {cpu::add, cpu::cast, cpu::widen};

#ifdef JAXNORM_ONCE
Isa isa() {
  static const Isa chosen = [] {
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    if (has_avx2 && has_avx512) return Isa::avx512;
    if (has_avx2) return Isa::avx2;
#endif
    return Isa::baseline;
  }();
  return chosen;
}

const char* isa_name() { return isa() == Isa::avx512 ? "avx512" : isa() == Isa::avx2 ? "avx2" : "baseline"; }
#endif

}  // namespace jaxnorm::cpu
