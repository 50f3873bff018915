# The units of the CUDA kernels, each of which instantiates functions of a header for dtypes. They are written to the folder
# JAXNORM_UNITS, and `jaxnorm_units` lists them, what takes longest to compile first. As a script, for those who compile
# them without the build:
#
#   cmake -D JAXNORM_UNITS=units -P cmake/units.cmake
if(CMAKE_SCRIPT_MODE_FILE)
  include("${CMAKE_CURRENT_LIST_DIR}/ops.cmake")
endif()

# Writes the unit for these types as HEADER_SUFFIX.cu and adds it to the list `among`.
function(jaxnorm_unit among header suffix functions types)
  set(content "#include \"ops/${op}/cuda/${header}.cuh\"\n\nnamespace jaxnorm::cuda {\n")
  foreach(type IN LISTS types)
    foreach(function IN LISTS functions)
      string(APPEND content "template decltype(${function}<${type}>) ${function}<${type}>;\n")
    endforeach()
  endforeach()
  set(unit "${JAXNORM_UNITS}/${header}_${suffix}.cu")
  file(CONFIGURE OUTPUT "${unit}" CONTENT "${content}}  // namespace jaxnorm::cuda\n" @ONLY)
  set(${among} ${${among}} "${unit}" PARENT_SCOPE)
endfunction()

# The half types share a unit, whose code takes a fifth less room than that of two.
macro(jaxnorm_kernels header functions)
  jaxnorm_unit(halves ${header} half "${functions}" "__half;__nv_bfloat16")
  jaxnorm_unit(others ${header} f32 "${functions}" float)
endmacro()

foreach(op IN LISTS jaxnorm_ops)
  include("${CMAKE_CURRENT_LIST_DIR}/../src/ops/${op}/cuda.cmake" OPTIONAL)
endforeach()
set(jaxnorm_units ${halves} ${others})
