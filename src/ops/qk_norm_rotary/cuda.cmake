# The units of the kernels, see cmake/units.cmake.
jaxnorm_kernels(qk_norm_rotary run_qk_norm_rotary)
jaxnorm_kernels(qk_norm_rotary_grad run_qk_norm_rotary_grad)
