// With what `run` is declared beside an op's struct, for each platform, without CUDA's headers:
//
//   void cpu::run(const L2NormForward& p, const ParallelFor& parallel_for);
//   Outcome cuda::run(const L2NormForward& p, Stream stream);
#pragma once

#include <cstdint>
#include <functional>

namespace jaxnorm {

namespace cpu {

// Calls task(i) once for each i in [0, count), in any order and on any threads, and returns when all have returned.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& task)>;

}  // namespace cpu

namespace cuda {

// A cudaStream_t and a cudaError_t, see engine/cuda/device.h.
struct Stream;
struct Outcome;

}  // namespace cuda

}  // namespace jaxnorm
