# The units of the kernels, see cmake/units.cmake.
jaxnorm_kernels(sandwich_norm run_sandwich_norm)
