"""RMSNorm and LayerNorm.

**Weights.** Over trailing axes, scale and bias may have more axes before the normalised ones. Kernels serve such
weights if the axes along which they differ are neighbours in x, and rows have up to 8192 elements. A vmapped weight is
one of these; under a vmap over weights alone the formula runs.

**With a residual.** The gradients of x and branch_scale are XLA's, by that of the sum. A sum that is not asked for is
written all the same where a derivative is taken, or y is padded or has another dtype.

**With a gate.** Kernels take a sigmoid below 2**-126 for 0. A gradient keeps x, the gate and a float32 a row, or a
group of columns. XLA's code runs under a vmap over scale, and for rows or groups of more than 16384 columns. A
`group_size` is as in Mamba2 with n_groups > 1 and Nemotron-H.

**Quantised.** A NaN or infinity makes its row's scale NaN, float8 values NaN, int8 values 0; numbers beyond 1e19 all
are 0. With `straight_through` the derivative is by convention that of the norm that is not quantised, of whose y
`dequantize` passes on the cotangent; by smooth_scale and static_scale it is zero. With `with_unquantized` y is bit for
bit that norm's. No kernel serves weights with axes before the normalised ones, nor several normalised groups that share
a scale: those of a gated norm with `group_size` and granularity "token", or "group" with another size that group_size
is no multiple of.
"""
