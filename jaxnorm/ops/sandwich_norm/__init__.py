"""Two norms with a sum in between.

In a gradient one native call serves the cotangents of both results; x, new_residual and two float32 a row are kept for
it. With a `branch_scale` each norm is a native call. XLA's code runs under a vmap over a scale, and for scales with
axes before the normalised one; kernels give y of x's dtype.
"""
