# The ops, each a folder of src/ops and a line here. Another tree builds some of them: -D JAXNORM_OPS=softmax.
#
# A folder has
#
#   call.h               the struct of a call in each direction, and what it runs on the CPU and on CUDA
#   read.h               the readers, and `kTable`: a row for each target
#   cpu/*.cc             the CPU kernels, compiled for each instruction set, and what is compiled once, see engine/cpu/launch.h
#   cpu/run.cc           launches that are a source of their own, compiled once
#   cuda/*.cu, *.cc      the CUDA kernels, and from a call to the code for its dtype
#
# and what it lacks the op has not.
set(JAXNORM_OPS "" CACHE STRING "Which ops to build, ';' between them; empty: all")
set(jaxnorm_ops "")

# The op of this name. NEEDS: the others whose code it calls. KERNELS and APART: what units.cmake compiles by dtype of
# headers in cuda/, each as header:function,function.
macro(jaxnorm_op name)
  list(APPEND jaxnorm_ops ${name})
  cmake_parse_arguments(jaxnorm_${name} "" "" "NEEDS;KERNELS;APART" ${ARGN})
endmacro()

jaxnorm_op(norm
  KERNELS norm:run_norm add_norm:run_add_norm,run_scaled_add_norm gated_norm:run_gated_norm
          gated_norm_grad:gated_norm_grad_of
  APART quantized_norm:run_quantized_norm norm_grad_launch:norm_grad_of)
jaxnorm_op(sandwich_norm NEEDS norm KERNELS sandwich_norm:run_sandwich_norm)
jaxnorm_op(group_norm)
jaxnorm_op(gated_activation)
jaxnorm_op(softmax APART softmax_grad:softmax_grad_of,log_softmax_grad_of:AnyElement)
jaxnorm_op(cross_entropy)
jaxnorm_op(qk_norm_rotary KERNELS qk_norm_rotary_grad:run_qk_norm_rotary_grad APART qk_norm_rotary:run_qk_norm_rotary)
jaxnorm_op(segment_sum)
jaxnorm_op(sample)
jaxnorm_op(quantize)
jaxnorm_op(quantized_dot)
jaxnorm_op(float8_linear NEEDS quantized_dot)

if(JAXNORM_OPS)
  set(jaxnorm_ops "")
  foreach(op IN LISTS JAXNORM_OPS)
    list(APPEND jaxnorm_ops ${op} ${jaxnorm_${op}_NEEDS})
  endforeach()
  list(REMOVE_DUPLICATES jaxnorm_ops)
endif()

# Sets `found` to the files of the ops' folders that these patterns name.
function(jaxnorm_find found)
  set(all "")
  foreach(op IN LISTS jaxnorm_ops)
    foreach(pattern IN LISTS ARGN)
      file(GLOB files CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/src/ops/${op}/${pattern}")
      list(APPEND all ${files})
    endforeach()
  endforeach()
  set(${found} ${all} PARENT_SCOPE)
endfunction()

# Writes PLATFORM_ops.h, the table of all ops for "cpu" or "cuda", and adds its folder to what the module includes.
function(jaxnorm_write_table platform)
  set(includes "")
  set(tables "")
  foreach(op IN LISTS jaxnorm_ops)
    string(APPEND includes "#include \"ops/${op}/read.h\"\n")
    list(APPEND tables "ops::${op}::kTable<Platform>")
  endforeach()
  list(JOIN tables ", " tables)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/${platform}_table")
  file(CONFIGURE OUTPUT "${folder}/${platform}_ops.h" @ONLY CONTENT "#pragma once\n\n${includes}
namespace jaxnorm {\ntemplate <class Platform>
inline constexpr auto kTable = std::tuple_cat(${tables});\n}  // namespace jaxnorm\n")
  target_include_directories(_${platform} PRIVATE "${folder}")
endfunction()
