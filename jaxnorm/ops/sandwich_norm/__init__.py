"""Two norms with a sum in between.

A gradient is one native call for the cotangents of both results, and keeps x, new_residual and two float32 a row. With
a `branch_scale` each norm is a native call. XLA's code runs under a vmap over a scale, for scales with axes before the
normalised one, and for y of another dtype than x's.
"""
