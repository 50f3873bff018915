// The types that a call runs with, so that an op's `run` for each platform can be declared beside its struct:
//
//   namespace cpu { void run(const L2NormForward& p, const ParallelFor& parallel_for); }
//   namespace cuda { Outcome run(const L2NormForward& p, Stream stream); }
//
// Nothing of CUDA's headers is needed for that, which a build for the CPU does not have.
#pragma once

#include <cstdint>
#include <functional>

namespace jaxnorm {

namespace cpu {

// Calls task(i) once for each i in [0, count), in any order and on any threads, and returns when all have returned.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& task)>;

}  // namespace cpu

namespace cuda {

// A cudaStream_t and a cudaError_t, see cuda/engine/device.h.
struct Stream;
struct Outcome;

}  // namespace cuda

}  // namespace jaxnorm
