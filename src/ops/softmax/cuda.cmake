jaxnorm_kernels(softmax run_softmax)
jaxnorm_kernels(softmax_grad_launch "softmax_grad_of;log_softmax_grad_of")
jaxnorm_unit(others softmax_grad_launch mixed "softmax_grad_of;log_softmax_grad_of" AnyElement)
