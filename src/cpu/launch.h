// The CPU kernels of the norms.
#pragma once

#include <cstdint>
#include <functional>

#include "norm.h"

namespace jaxnorm::cpu {

// Calls task(i) once for each i in [0, count), in any order and on any threads, and returns when all have returned.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& task)>;

void forward(const Forward& f, const ParallelFor& parallel_for);
void backward(const Backward& b, const ParallelFor& parallel_for);

// The instruction set that this processor's kernels were compiled for: "avx512", "avx2" or "baseline".
const char* isa();

}  // namespace jaxnorm::cpu
