"""The addition that an op may begin with."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.sharding import dims


def add(x: jax.Array, addend: jax.Array) -> jax.Array:
    """`x + addend`, rounded once, to addend's dtype.

    The wider of their dtypes is enough for that, float32 for two half types. Where they are of one dtype nothing is
    converted, in the cotangents neither.
    """
    if x.dtype == addend.dtype:
        return x + addend
    dtype = dims.wide_dtype((x.dtype, addend.dtype))
    return rounded((x.astype(dtype) + addend.astype(dtype)).astype(addend.dtype))


def rounded(array: jax.Array) -> jax.Array:
    """An array that XLA rounds to its dtype: of a cast that is undone in the same fusion it does neither, on a GPU."""
    if array.dtype.itemsize > 2:
        return array
    kind: Any = jnp.finfo(array.dtype)  # type: ignore[no-untyped-call]
    return jax.lax.reduce_precision(array.astype(jnp.float32), kind.nexp, kind.nmant).astype(array.dtype)
