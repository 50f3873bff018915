# Why this CUDA compiler, of which that is the text of `nvcc --version`, cannot build the kernels; empty if it can.
function(jaxnorm_judge_compiler why compiler text)
  set(remedy "Install the CUDA toolkit (nvcc 12.8 or newer) and put nvcc on PATH or set CUDACXX, or set \
JAXNORM_CUDA=pypi to take NVIDIA's compiler from PyPI")
  set(${why} "" PARENT_SCOPE)
  if(NOT compiler)
    set(${why} "there is no CUDA compiler. ${remedy}" PARENT_SCOPE)
  elseif(text MATCHES "release ([0-9]+[.][0-9]+)" AND CMAKE_MATCH_1 VERSION_LESS 12.8)
    set(${why} "${compiler} is nvcc ${CMAKE_MATCH_1}, older than 12.8. ${remedy}" PARENT_SCOPE)
  endif()
endfunction()

# All that a wheel is compiled for, and what a build is that nothing tells more, whose last has PTX too, which serves
# newer GPUs. 80 is the A100, 90 the H100 and H200, 100 the B200; machine code for 80 runs on 86 and 89, whose own would gain
# what JAXNORM_FLOAT8_ARCHITECTURE is for. A wheel has no PTX, a fifth of its size for GPUs that are to come.
set(JAXNORM_EVERY_ARCHITECTURE 75-real 80-real 90-real 100-real 120-real)
set(JAXNORM_COMMON_ARCHITECTURES 80-real 90-real 100)
set(JAXNORM_LEAST_ARCHITECTURE 75)
# The first that converts to float8 by an instruction: a wheel has the kernels that do so for it too.
set(JAXNORM_FLOAT8_ARCHITECTURE 89)

# Sets `chosen` to those of `architectures` that the compiler knows, with PTX for the newest of them.
#
# `known`: what it compiles for, as 90, or nothing if it does not say.
function(jaxnorm_keep_known chosen architectures known)
  set(kept "")
  foreach(architecture ${architectures})
    string(REGEX MATCH "^[0-9]+" number "${architecture}")
    if(NOT known OR number IN_LIST known)
      list(APPEND kept "${architecture}")
    endif()
  endforeach()
  list(POP_BACK kept newest)
  string(REPLACE "-real" "" newest "${newest}")
  set(${chosen} ${kept} ${newest} PARENT_SCOPE)
endfunction()

# Sets `chosen` to the architectures to compile for: those of the GPUs that are present, each with PTX too, so that the
# build serves a newer one; or the common ones, where there is none or the compiler does not know one of them.
#
# `present`: compute capabilities, as 9.0; `known` as above.
function(jaxnorm_choose_architectures chosen present known)
  jaxnorm_keep_known(common "${JAXNORM_COMMON_ARCHITECTURES}" "${known}")
  set(own "")
  foreach(capability ${present})
    string(REPLACE "." "" number "${capability}")
    if(number LESS JAXNORM_LEAST_ARCHITECTURE)
      message(STATUS "jaxnorm: no CUDA kernel runs on the GPU of compute capability ${capability}, but on 7.5 and newer")
      set(own "")
      break()
    elseif(known AND NOT number IN_LIST known)
      message(STATUS "jaxnorm: this nvcc does not know the GPU's compute capability ${capability}; PTX serves a newer GPU, "
                     "and a newer CUDA toolkit would compile for it")
      set(own "")
      break()
    endif()
    list(APPEND own "${number}")
  endforeach()
  if(own)
    list(REMOVE_DUPLICATES own)
    set(${chosen} "${own}" PARENT_SCOPE)
  else()
    set(${chosen} "${common}" PARENT_SCOPE)
  endif()
endfunction()

# Sets `time` to how long so many cores compile the kernels for `architectures`, in words.
function(jaxnorm_estimate_time time architectures cores)
  list(LENGTH architectures count)
  # Minutes of one core for an architecture, see docs/findings.md; CPU kernels and the host's code included.
  math(EXPR minutes "(19 * ${count} + ${cores} - 1) / ${cores}")
  set(${time} "about ${minutes} min on ${cores} cores" PARENT_SCOPE)
endfunction()
