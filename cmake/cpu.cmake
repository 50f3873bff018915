# _cpu: the kernels, compiled once for each instruction set and chosen among when they are first called.
jaxnorm_find(launches cpu/run.cc)
jaxnorm_add_module(_cpu src/ffi/cpu_module.cc ${launches})
jaxnorm_write_table(cpu)

# -ffp-contract=off: where two operations are fused is written in the kernels and not left to the compiler.
# -fno-math-errno: a square root is one instruction. -Wno-unused-function: headers define functions for each source anew,
# in a namespace without a name, so that none is shared with a source for another instruction set.
jaxnorm_find(kernels cpu/*.cc)
list(REMOVE_ITEM kernels ${launches})
function(jaxnorm_add_isa name)
  add_library(cpu_${name} OBJECT src/engine/cpu/launch.cc ${kernels})
  target_include_directories(cpu_${name} PRIVATE "${CMAKE_SOURCE_DIR}/src")
  target_compile_definitions(cpu_${name} PRIVATE JAXNORM_ISA=${name})
  target_compile_options(cpu_${name} PRIVATE -Wall -Wextra -Wno-unused-function -ffp-contract=off -fno-math-errno ${ARGN})
  target_link_libraries(_cpu PRIVATE cpu_${name})
endfunction()

jaxnorm_add_isa(baseline -DJAXNORM_ONCE)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  # Every processor with AVX2 and FMA has F16C.
  jaxnorm_add_isa(avx2 -mavx2 -mfma -mf16c)
  jaxnorm_add_isa(avx512 -mavx512f -mavx512vl -mavx512bw -mavx512dq -mfma -mf16c)
endif()
