# The units of the CUDA kernels, each of which instantiates functions of a header for dtypes. They are written to the folder
# JAXNORM_UNITS, and `jaxnorm_units` lists them, what takes longest to compile first. As a script, for those who compile
# them without the build:
#
#   cmake -D JAXNORM_UNITS=units -P cmake/units.cmake

# Writes the unit for these types as HEADER_SUFFIX.cu and adds it to the list `among`.
function(jaxnorm_unit among header suffix functions types)
  set(content "#include \"cuda/ops/${header}.cuh\"\n\nnamespace jaxnorm::cuda {\n")
  foreach(type IN LISTS types)
    foreach(function IN LISTS functions)
      string(APPEND content "template decltype(${function}<${type}>) ${function}<${type}>;\n")
    endforeach()
  endforeach()
  set(unit "${JAXNORM_UNITS}/${header}_${suffix}.cu")
  file(CONFIGURE OUTPUT "${unit}" CONTENT "${content}}  // namespace jaxnorm::cuda\n" @ONLY)
  set(${among} ${${among}} "${unit}" PARENT_SCOPE)
endfunction()

# The half types share a unit, which takes a fifth less room in a wheel. With APART, where it would take minutes to
# compile, they do not.
macro(jaxnorm_kernels header functions)
  if("${ARGN}" STREQUAL "APART")
    jaxnorm_unit(apart ${header} f32 "${functions}" float)
    jaxnorm_unit(apart ${header} f16 "${functions}" __half)
    jaxnorm_unit(apart ${header} bf16 "${functions}" __nv_bfloat16)
  else()
    jaxnorm_unit(halves ${header} half "${functions}" "__half;__nv_bfloat16")
    jaxnorm_unit(others ${header} f32 "${functions}" float)
  endif()
endmacro()

jaxnorm_kernels(norm_grad_launch norm_grad_of APART)
jaxnorm_kernels(norm run_norm APART)
jaxnorm_kernels(quantized_norm run_quantized_norm APART)
jaxnorm_kernels(add_norm run_add_norm APART)
jaxnorm_kernels(softmax run_softmax)
jaxnorm_kernels(softmax_grad_launch "softmax_grad_of;log_softmax_grad_of")
jaxnorm_unit(others softmax_grad_launch mixed "softmax_grad_of;log_softmax_grad_of" AnyElement)
jaxnorm_kernels(gated_norm_grad gated_norm_grad_of)
jaxnorm_kernels(qk_norm_rotary run_qk_norm_rotary)
jaxnorm_kernels(qk_norm_rotary_grad run_qk_norm_rotary_grad)
jaxnorm_kernels(gated_norm_quantized run_gated_norm_quantized)
jaxnorm_kernels(cross_entropy run_cross_entropy)
jaxnorm_kernels(group_norm_grad run_group_norm_grad)
jaxnorm_kernels(gated_norm run_gated_norm)
jaxnorm_kernels(sandwich_norm run_sandwich_norm)
jaxnorm_kernels(group_norm run_group_norm)
set(jaxnorm_units ${apart} ${halves} ${others})
