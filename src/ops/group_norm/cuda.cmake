# The units of the kernels, see cmake/units.cmake.
jaxnorm_kernels(group_norm_grad run_group_norm_grad)
jaxnorm_kernels(group_norm run_group_norm)
