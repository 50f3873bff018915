# The units of the CUDA kernels whose dtypes are not all compiled together, or whose header others include: each
# instantiates functions of a header for dtypes. They are written to the folder JAXNORM_UNITS, and `jaxnorm_units` lists
# them, what takes longest to compile first. As a script, for those who compile them without the build:
#
#   cmake -D JAXNORM_UNITS=units -P cmake/units.cmake
if(CMAKE_SCRIPT_MODE_FILE)
  include("${CMAKE_CURRENT_LIST_DIR}/ops.cmake")
endif()

# Writes NAME.cu for these types and adds it to jaxnorm_units.
function(jaxnorm_unit name header functions types)
  set(content "#include \"ops/${op}/cuda/${header}.cuh\"\n\nnamespace jaxnorm::cuda {\n")
  foreach(type IN LISTS types)
    foreach(function IN LISTS functions)
      string(APPEND content "template decltype(${function}<${type}>) ${function}<${type}>;\n")
    endforeach()
  endforeach()
  set(unit "${JAXNORM_UNITS}/${name}.cu")
  file(CONFIGURE OUTPUT "${unit}" CONTENT "${content}}  // namespace jaxnorm::cuda\n" @ONLY)
  set(jaxnorm_units ${jaxnorm_units} "${unit}" PARENT_SCOPE)
endfunction()

# Sets header, functions and types from kernel, which is header:function,function:type, the last beside the dtypes.
macro(jaxnorm_split)
  string(REGEX MATCH "^([a-z_]+):([a-z_,]+):?(.*)$" matched "${kernel}")
  set(header ${CMAKE_MATCH_1})
  string(REPLACE "," ";" functions "${CMAKE_MATCH_2}")
  set(types ${CMAKE_MATCH_3})
endmacro()

set(jaxnorm_units "")
foreach(op IN LISTS jaxnorm_ops)
  # float32 apart: of what takes longest to compile, and where in one unit some kernels would come out otherwise. So is
  # each type beside the dtypes.
  foreach(kernel IN LISTS jaxnorm_${op}_APART)
    jaxnorm_split()
    jaxnorm_unit(${header}_half ${header} "${functions}" "__half;__nv_bfloat16")
    foreach(type IN ITEMS float ${types})
      jaxnorm_unit(${header}_${type} ${header} "${functions}" ${type})
    endforeach()
  endforeach()
  # All types share a unit: their code is alike, and takes less room compressed together.
  foreach(kernel IN LISTS jaxnorm_${op}_KERNELS)
    jaxnorm_split()
    jaxnorm_unit(${header} ${header} "${functions}" "__half;__nv_bfloat16;float")
  endforeach()
endforeach()
