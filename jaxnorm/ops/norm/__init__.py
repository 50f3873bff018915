"""RMSNorm and LayerNorm.

**Weights.** For trailing axes, scale and bias may have more axes before the normalised ones. Kernels serve them if the
axes along which they differ are neighbours in x, and rows have up to 8192 elements. vmapped weights are such weights;
under a vmap over weights alone the formula runs.

**With a residual.** XLA computes the gradients of x and branch_scale from the sum's. A sum that nothing reads is still
written under a derivative, or if y is padded or has another dtype.

**With a gate.** Kernels treat a sigmoid below 2**-126 as 0. A gradient keeps x, the gate and a float32 a row, or a
group of columns. XLA's code runs under a vmap over scale, and for rows or groups of more than 16384 columns.
`group_size` is that of Mamba2 with n_groups > 1 and Nemotron-H.

**Quantised.** A NaN or infinity makes its row's scale NaN, float8 values NaN, int8 values 0; a row with numbers beyond
1e19 becomes 0. With `straight_through` the derivative is by convention the unquantised norm's: `dequantize` passes its
cotangent on to y; smooth_scale and static_scale get zeros. With `with_unquantized` y has the bits of that norm. No
kernel serves weights with axes before the normalised ones, or a gated norm whose groups share a scale: `group_size`
with granularity "token", or with "group" of a size that does not divide it.
"""
