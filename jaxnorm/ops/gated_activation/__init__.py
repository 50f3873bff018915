"""An activation of a gate, times what it gates.

Kernels take a sigmoid below 2**-126 for 0. In a gradient x alone is kept, and one native call writes the gradients of
gate and up into one array like x, or into two. The exact gelu of jax.nn is `functools.partial(jax.nn.gelu,
approximate=False)`. Over a mesh that splits the columns, (..., 2, columns) and a tuple stay where they are; of (..., 2
* columns) a device has columns of one, and those of the other have to come from elsewhere: in a `jax.shard_map` use one
of the former. Over an Explicit mesh that splits the last axis into parts that do not divide its halves it is an error.
"""
