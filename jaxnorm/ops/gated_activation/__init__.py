"""`activation(gate) * up`: the elementwise step of a gated MLP.

Kernels treat a sigmoid below 2**-126 as 0. A gradient keeps x alone, and one native call writes those of gate and up,
into one array like x or into two. jax.nn's exact gelu is `functools.partial(jax.nn.gelu, approximate=False)`. A mesh
that splits the columns of (..., 2, columns) or of a tuple moves nothing. One that splits (..., 2 * columns) gives a
device columns of gate or of up, and the others must be fetched: in a `jax.shard_map` use one of the former. An Explicit
mesh must split that axis into parts that divide its halves.
"""
