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
list(APPEND sources
  ${jaxnorm_units} src/cuda/engine/partials.cu src/cuda/engine/grad_schedule.cc src/cuda/engine/plan.cc)
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

# The programs of tests/test_emulated_kernels.py, of the same objects, wherever all ops are built: `programs`.
file(GLOB programs CONFIGURE_DEPENDS tests/emulator/run*.cc)
list(FILTER programs EXCLUDE REGEX "run_(device|copied_dot)[.]cc$")  # of a GPU and a cuBLASLt of their own
add_library(kernels STATIC EXCLUDE_FROM_ALL "$<FILTER:$<TARGET_OBJECTS:_cuda>,EXCLUDE,/module[.]cc>")
set_target_properties(kernels PROPERTIES LINKER_LANGUAGE CXX)
add_library(mains OBJECT EXCLUDE_FROM_ALL ${programs})
target_include_directories(mains PRIVATE tests/emulator src)
target_include_directories(mains SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_precompile_headers(mains PRIVATE tests/emulator/emulator.h)
target_compile_options(mains PRIVATE -O1 -w -ffp-contract=off)
add_custom_target(programs)
find_package(Threads REQUIRED)
foreach(program IN LISTS programs)
  get_filename_component(name "${program}" NAME_WE)
  add_executable(${name} EXCLUDE_FROM_ALL "$<FILTER:$<TARGET_OBJECTS:mains>,INCLUDE,/${name}[.]cc>")
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX RUNTIME_OUTPUT_DIRECTORY programs)
  target_link_libraries(${name} PRIVATE kernels Threads::Threads)
  add_dependencies(programs ${name})
endforeach()
