# The units of the kernels, see cmake/units.cmake.
jaxnorm_kernels(round_rows run_round_rows)
jaxnorm_kernels(round_columns run_round_columns)
jaxnorm_kernels(round_gradient run_round_gradient)
