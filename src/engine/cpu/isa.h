// Kernels are compiled once for each instruction set, and chosen among at run time.
//
// The kernels of an op are a struct of pointers to functions with a constant for each instruction set,
//
//   struct Kernels {
//     static const Kernels baseline, avx2, avx512;
//     ...
//   };
//
// of which a source compiled for one defines its own, Kernels::JAXNORM_ISA. What such a source has for all of them, as
// the launches, stands in it behind `#ifdef JAXNORM_ONCE`: compiled for the baseline, which every processor runs.
#pragma once

namespace jaxnorm::cpu {

enum class Isa { baseline, avx2, avx512 };

// The one that this processor's kernels were compiled for, and its name.
Isa isa();
const char* isa_name();

template <class Kernels>
const Kernels& kernels() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return Kernels::avx512;
  if (isa() == Isa::avx2) return Kernels::avx2;
#endif
  return Kernels::baseline;
}

}  // namespace jaxnorm::cpu
