// Writes down which thread reads and writes which elements of arrays, for a program that includes kernels after this
// header. It is compiled with -fsanitize=thread, so that the compiler calls a function at each access of memory: those
// of accesses.cc, in place of the sanitizer's. Copies have to be calls as well: -fno-builtin-memcpy and the linker's
// --wrap=memcpy.
#pragma once

#include <functional>
#include <string>

#include "operands.h"

namespace accesses {

enum Kind : int32_t { launch, read, write, copy, read_copied };  // copy: to shared memory; read_copied: from there

// A launch has blocks, threads a block, blocks a cluster and bytes of dynamic shared memory. An access has block,
// thread, array, first element and how many.
struct Record {
  int32_t call, kernel, kind, value[5];
};

// From now on accesses of an array are written down.
void add(const jaxnorm::Input& array, int64_t elements, int id);

void begin_kernel(const cudaLaunchConfig_t& config);

template <typename... Args>
cudaError_t launch_kernel(const cudaLaunchConfig_t* config, const Args&... args) {
  begin_kernel(*config);
  return emulator::launch_kernel(config, args...);
}

// Runs the cases of the command line, which are a type, rows and columns, and writes their records. Returns what main
// does.
int run_cases(int argc, char** argv, const std::function<cudaError_t(const std::string&, int64_t, int64_t)>& run);

}  // namespace accesses

#undef cudaLaunchKernelEx
#define cudaLaunchKernelEx accesses::launch_kernel

// The compiler does not look at what a function writes in place of its result.
#define make_float4(...) \
  float4 { __VA_ARGS__ }
