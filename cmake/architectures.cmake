# The default set: the ones with PTX serve whatever is older, in between or newer.
set(JAXNORM_EVERY_ARCHITECTURE 75-virtual 80-real 86-real 89-real 90-real 100-real 120)
set(JAXNORM_LEAST_ARCHITECTURE 75)

# Sets `chosen` to the architectures to compile for: those of the GPUs that are present, each with PTX too, so that the
# build serves a newer one; or the default set, where there is none or the compiler does not know one of them.
#
# `present`: compute capabilities, as 9.0; `known`: what the compiler compiles for, as 90, or nothing if it does not say.
function(jaxnorm_choose_architectures chosen present known)
  set(every "")
  foreach(architecture ${JAXNORM_EVERY_ARCHITECTURE})
    string(REGEX MATCH "^[0-9]+" number "${architecture}")
    if(NOT known OR number IN_LIST known)
      list(APPEND every "${architecture}")
    endif()
  endforeach()
  # PTX for what is newer, whatever the newest is that the compiler knows.
  list(POP_BACK every newest)
  string(REPLACE "-real" "" newest "${newest}")
  list(APPEND every ${newest})

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
    set(${chosen} "${every}" PARENT_SCOPE)
  endif()
endfunction()
