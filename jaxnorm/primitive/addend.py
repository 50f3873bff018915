"""The addition that an op may begin with."""

import jax

from jaxnorm.sharding import dims


def add(x: jax.Array, addend: jax.Array) -> jax.Array:
    """`x + addend`, rounded once, to addend's dtype.

    The wider of their dtypes is enough for that, float32 for two half types. Where they are of one dtype nothing is
    converted, in the cotangents neither.
    """
    if x.dtype == addend.dtype:
        return x + addend
    dtype = dims.wide_dtype((x.dtype, addend.dtype))
    return (x.astype(dtype) + addend.astype(dtype)).astype(addend.dtype)
