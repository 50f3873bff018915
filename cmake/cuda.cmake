# _cuda: built where there are a driver and a CUDA compiler, with JAXNORM_CUDA=1 or an error, with JAXNORM_CUDA=0 never.
include(CheckLanguage)

include(cmake/architectures.cmake)
set(JAXNORM_CUDA "" CACHE STRING
  "1: build the CUDA kernels or fail; pypi: and with NVIDIA's compiler from PyPI; 0: do not; empty: if there is a driver")
if(DEFINED ENV{JAXNORM_CUDA})
  set(JAXNORM_CUDA "$ENV{JAXNORM_CUDA}")
endif()
if(NOT JAXNORM_CUDA MATCHES "^(0|1|pypi)?$")
  message(FATAL_ERROR "jaxnorm: JAXNORM_CUDA is ${JAXNORM_CUDA}, expected 0, 1, pypi or nothing")
endif()

# Leaves the CUDA kernels out, and says why and what to do in the build's last line; an error where they are asked for.
function(jaxnorm_leave_cuda_out why)
  if(JAXNORM_CUDA)
    message(FATAL_ERROR "jaxnorm: JAXNORM_CUDA=${JAXNORM_CUDA} asks for the CUDA kernels, and ${why}")
  endif()
  set(said "jaxnorm: built without CUDA, because ${why}")
  message(STATUS "${said}")
  install(CODE "message(STATUS \"${said}\")")
endfunction()

if(JAXNORM_CUDA STREQUAL "0")
  jaxnorm_leave_cuda_out("JAXNORM_CUDA=0")
  return()
endif()
set(cuda_wheels "${CMAKE_CURRENT_SOURCE_DIR}/tools/cuda_wheels.py")
if(NOT JAXNORM_CUDA)
  execute_process(COMMAND "${Python_EXECUTABLE}" "${cuda_wheels}" --driver RESULT_VARIABLE no_driver)
  if(no_driver)
    jaxnorm_leave_cuda_out("there is no NVIDIA driver; JAXNORM_CUDA=1 builds its kernels all the same, with nvcc, and \
JAXNORM_CUDA=pypi with NVIDIA's compiler from PyPI")
    return()
  endif()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE)  # there may be one now
endif()
if(NOT JAXNORM_CUDA STREQUAL "pypi")
  check_language(CUDA)
  unset(CMAKE_CUDA_COMPILER)  # a variable beside the cache's entry, which it would hide
endif()
if(JAXNORM_CUDA STREQUAL "pypi" OR NOT CMAKE_CUDA_COMPILER)
  # Where the build requires NVIDIA's compiler from PyPI, it is among the packages of its environment.
  execute_process(COMMAND "${Python_EXECUTABLE}" "${cuda_wheels}"
                  OUTPUT_VARIABLE nvcc ERROR_VARIABLE why_none RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed AND JAXNORM_CUDA STREQUAL "pypi")
    jaxnorm_leave_cuda_out("${why_none}")
  elseif(NOT failed)
    if(CMAKE_CUDA_COMPILER AND NOT CMAKE_CUDA_COMPILER STREQUAL nvcc)  # what CMake knows of the one before
      file(REMOVE "${CMAKE_BINARY_DIR}/CMakeFiles/${CMAKE_VERSION}/CMakeCUDACompiler.cmake")
    endif()
    set(CMAKE_CUDA_COMPILER "${nvcc}" CACHE FILEPATH "" FORCE)
  endif()
endif()
set(nvcc_version "")
if(CMAKE_CUDA_COMPILER)
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE nvcc_version ERROR_QUIET)
endif()
jaxnorm_judge_compiler(unfit "${CMAKE_CUDA_COMPILER}" "${nvcc_version}")
if(unfit)
  jaxnorm_leave_cuda_out("${unfit}")
  return()
endif()

# Architectures: JAXNORM_CUDA_ARCHITECTURES if set, else those that are chosen by the present GPUs.
set(JAXNORM_CUDA_ARCHITECTURES "" CACHE STRING "CUDA architectures, ';' between them; every: those of a wheel")
if(DEFINED ENV{JAXNORM_CUDA_ARCHITECTURES})
  set(JAXNORM_CUDA_ARCHITECTURES "$ENV{JAXNORM_CUDA_ARCHITECTURES}")
endif()
if(JAXNORM_CUDA_ARCHITECTURES STREQUAL "every")
  set(JAXNORM_CUDA_ARCHITECTURES "${JAXNORM_EVERY_ARCHITECTURE}")
elseif(NOT JAXNORM_CUDA_ARCHITECTURES)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE present RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    set(present "")
  endif()
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" present "${present}")
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-arch
                  OUTPUT_VARIABLE known RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    set(known "")
  endif()
  string(REGEX MATCHALL "[0-9]+" known "${known}")
  jaxnorm_choose_architectures(JAXNORM_CUDA_ARCHITECTURES "${present}" "${known}")
endif()
set(CMAKE_CUDA_ARCHITECTURES ${JAXNORM_CUDA_ARCHITECTURES})
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
enable_language(CUDA)
# -O is the host code's, of which each kernel has some; kernels are optimised whatever it says.
string(REPLACE "-O3" "-O1" CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")
list(JOIN JAXNORM_CUDA_ARCHITECTURES " " architectures)
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
jaxnorm_estimate_time(time "${JAXNORM_CUDA_ARCHITECTURES}" ${cores})
message(STATUS "jaxnorm: CUDA kernels on (nvcc ${CMAKE_CUDA_COMPILER_VERSION})")
message(STATUS "jaxnorm: compiling for ${architectures} takes ${time}; JAXNORM_CUDA_ARCHITECTURES chooses, "
               "as 90-real for an H100 or H200 alone")

set(JAXNORM_UNITS "${CMAKE_CURRENT_BINARY_DIR}/units")
include(cmake/units.cmake)
jaxnorm_find(sources cuda/*.cu cuda/*.cc)
list(APPEND sources "${CMAKE_CURRENT_SOURCE_DIR}/src/ops/norm/cuda/plan.cc")  # of any module, see src/engine/cuda/plan.h
list(REMOVE_DUPLICATES sources)
jaxnorm_add_module(_cuda ${jaxnorm_units} ${sources} src/engine/cuda/partials.cu src/engine/cuda/device.cu
  src/engine/cuda/plan.cc src/engine/cuda/cublaslt.cc src/ffi/cuda_module.cc)
jaxnorm_write_table(cuda)
# --fmad=false: where two operations are fused is written in the kernels and not left to the compiler, or a row's bits
# would depend on which copy of the code it meets.
# --compress-mode=size: machine code takes a fifth of the room, and is unpacked once, when it is loaded.
target_compile_options(_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false --compress-mode=size>)
if(JAXNORM_CUDA_ARCHITECTURES STREQUAL JAXNORM_EVERY_ARCHITECTURE)
  # Where there are more cores than units, the longest unit would take minutes more, an architecture after the other.
  target_compile_options(_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--threads=2>)
  get_target_property(sources _cuda SOURCES)
  list(FILTER sources INCLUDE REGEX "quantized?[a-z0-9_]*[.]cu$")
  set(float8 ${JAXNORM_FLOAT8_ARCHITECTURE})
  set_property(SOURCE ${sources} APPEND PROPERTY COMPILE_OPTIONS
               "-gencode=arch=compute_${float8},code=sm_${float8}")
endif()
# Static, so that the module loads where there is no CUDA driver.
set_target_properties(_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static)
# The C++ files want CUDA's headers. find_package(CUDAToolkit) would not do: PyPI's packages have no libcudart.so.
target_include_directories(_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(_cuda PRIVATE ${CMAKE_DL_LIBS})
target_compile_definitions(_cuda PRIVATE JAXNORM_CUDA_ARCHITECTURES="${architectures}"
  JAXNORM_CUDA_TOOLKIT="${CMAKE_CUDA_COMPILER_VERSION}")
