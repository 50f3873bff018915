# The units of the kernels, see cmake/units.cmake.
jaxnorm_kernels(norm_grad_launch norm_grad_of)
jaxnorm_kernels(norm run_norm)
jaxnorm_kernels(quantized_norm run_quantized_norm)
jaxnorm_kernels(add_norm "run_add_norm;run_scaled_add_norm")
jaxnorm_kernels(gated_norm_grad gated_norm_grad_of)
jaxnorm_kernels(gated_norm run_gated_norm)
