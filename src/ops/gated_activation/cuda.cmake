# The units of the kernels, see cmake/units.cmake.
jaxnorm_kernels(gated_activation_quantized run_gated_activation_quantized)
jaxnorm_kernels(gated_activation "run_gated_activation;run_gated_activation_grad")
