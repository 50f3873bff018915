// The kernels on arrays without rows.
#include "engine/cpu/arrays.h"

#include "engine/cpu/columns.h"
#include "engine/cpu/types.h"

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

}  // namespace jaxnorm::cpu
