# _cpu: the kernels, compiled once for each instruction set and chosen among when they are first called.
jaxnorm_add_module(_cpu
  src/ffi/cpu_module.cc src/cpu/kernels.cc
  src/cpu/ops/norm.cc src/cpu/ops/gated_norm.cc src/cpu/ops/gated_norm_quantized.cc src/cpu/ops/group_norm.cc
  src/cpu/ops/sandwich_norm.cc src/cpu/ops/softmax.cc src/cpu/ops/cross_entropy.cc src/cpu/ops/qk_norm_rotary.cc)

# -ffp-contract=off: where two operations are fused is written in the kernels and not left to the compiler.
# -fno-math-errno: a square root is one instruction.
function(jaxnorm_add_isa name)
  add_library(cpu_${name} OBJECT src/cpu/isa.cc)
  target_include_directories(cpu_${name} PRIVATE "${CMAKE_SOURCE_DIR}/src")
  target_compile_definitions(cpu_${name} PRIVATE JAXNORM_ISA=${name} JAXNORM_ISA_NAME="${name}")
  target_compile_options(cpu_${name} PRIVATE -Wall -Wextra -ffp-contract=off -fno-math-errno ${ARGN})
  target_link_libraries(_cpu PRIVATE cpu_${name})
endfunction()

jaxnorm_add_isa(baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  # Every processor with AVX2 and FMA has F16C.
  jaxnorm_add_isa(avx2 -mavx2 -mfma -mf16c)
  jaxnorm_add_isa(avx512 -mavx512f -mavx512vl -mavx512bw -mavx512dq -mfma -mf16c)
endif()
