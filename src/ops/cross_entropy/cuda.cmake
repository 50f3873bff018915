# The units of the kernels, see cmake/units.cmake.
jaxnorm_kernels(cross_entropy run_cross_entropy)
