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
