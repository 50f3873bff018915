# _cuda for the CPU platform: the handlers of CUDA with the kernels that the host's compiler makes of them, in
# emulator.cc. It is part of no wheel; tests/lib/emulated.py has it built, with the project around it:
#
#   JAXNORM_CUDA=0 cmake -S . -B build -D CMAKE_PROJECT_INCLUDE=tests/emulator/module.cmake
if(NOT COMMAND jaxnorm_write_table)  # the project's first line; the ops and the functions are known behind its last
  cmake_language(DEFER CALL include "${CMAKE_PROJECT_INCLUDE}")
  return()
endif()

find_package(CUDAToolkit REQUIRED)
set(JAXNORM_UNITS "${CMAKE_CURRENT_BINARY_DIR}/units")
include(cmake/units.cmake)
jaxnorm_find(sources cuda/*.cu cuda/*.cc)
list(FILTER sources EXCLUDE REGEX "/quantized_dot/")  # cuBLASLt's
set(plans src/engine/cuda/plan.cc "${CMAKE_CURRENT_SOURCE_DIR}/src/ops/norm/cuda/plan.cc")
list(APPEND sources ${jaxnorm_units} src/engine/cuda/partials.cu ${plans})
list(REMOVE_DUPLICATES sources)
set_source_files_properties(${sources} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-xc++")
jaxnorm_add_module(_cuda ${sources} tests/emulator/emulator.cc tests/emulator/module.cc
  tests/emulator/moved.cc)
jaxnorm_write_table(cuda)
target_include_directories(_cuda BEFORE PRIVATE tests/emulator)
target_include_directories(_cuda SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_precompile_headers(_cuda PRIVATE tests/emulator/emulator.h)
# gnu2: what is thread-local, as every variable in shared memory is, costs no call.
target_compile_options(_cuda PRIVATE -O1 -w -ffp-contract=off -mtls-dialect=gnu2)
target_compile_definitions(_cuda PRIVATE JAXNORM_CUDA_ARCHITECTURES="emulated"
  JAXNORM_CUDA_TOOLKIT="${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR}")

# What tests/test_emulated_kernels.py runs, `programs`: run_device has a GPU of its own, and `alone` is a library.
find_package(Threads REQUIRED)
set_source_files_properties(tests/toy/l2_norm.cu src/engine/cuda/device.cu PROPERTIES
  LANGUAGE CXX COMPILE_OPTIONS "-xc++")
add_executable(run_plans EXCLUDE_FROM_ALL tests/emulator/run_plans.cc src/ops/qk_norm_rotary/cuda/plan.cc ${plans})
add_executable(run_device EXCLUDE_FROM_ALL tests/emulator/run_device.cc src/engine/cuda/device.cu)
add_library(alone MODULE EXCLUDE_FROM_ALL
  tests/toy/l2_norm.cu tests/emulator/alone.cc tests/emulator/emulator.cc ${plans})
add_custom_target(programs DEPENDS run_plans run_device alone)
foreach(program run_plans run_device alone)
  set_target_properties(${program} PROPERTIES CXX_VISIBILITY_PRESET default
    RUNTIME_OUTPUT_DIRECTORY programs LIBRARY_OUTPUT_DIRECTORY programs)
  target_include_directories(${program} PRIVATE tests/emulator tests src)
  target_include_directories(${program} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_precompile_headers(${program} PRIVATE tests/emulator/emulator.h)
  target_compile_options(${program} PRIVATE -O1 -w -ffp-contract=off)
  target_link_libraries(${program} PRIVATE Threads::Threads)
endforeach()
