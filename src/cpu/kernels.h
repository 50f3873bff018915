// What is compiled once for each instruction set, as a table to choose by at run time.
#pragma once

#include <cstdint>

#include "norm.h"

namespace jaxnorm::cpu {

// In what these are given, scale, bias and smooth are f32 and the scale has its offset in it: widen() makes them so.
// `count` elements are any number of neighbours in an array.
// `traffic` is how many bytes all rows of the call read and write.
struct Kernels {
  const char* isa;

  // Normalises rows [begin, end), and quantises them where that is asked for.
  void (*forward)(const Forward& f, int64_t begin, int64_t end, int64_t traffic);

  // Writes dx of rows [begin, end) and adds their dscale and dbias, where asked for, to f32 sums of a row for each
  // head.
  void (*backward)(const Backward& b, int64_t begin, int64_t end, float* dscale, float* dbias, int64_t traffic);

  // Adds `from` to `into`.
  void (*add)(const float* from, float* into, int64_t count);

  void (*cast)(const float* from, Output into, int64_t count);

  // Writes from + offset.
  void (*widen)(Input from, float offset, float* into, int64_t count);
};

extern const Kernels baseline, avx2, avx512;

}  // namespace jaxnorm::cpu
