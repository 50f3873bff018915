"""The addition that an op may begin with."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.sharding import dims


def add(x: jax.Array, addend: jax.Array, factor: jax.Array | None = None) -> jax.Array:
    """`x + addend`, or `factor * x + addend`, rounded once, to addend's dtype.

    The wider of their dtypes is enough for that, float32 for half types. Where they are of one dtype nothing is
    converted, in the cotangents neither. The product is rounded to the wider dtype before it is added.
    """
    if factor is not None:
        dtype = dims.wide_dtype((x.dtype, addend.dtype, factor.dtype))
        product, wide = factor.astype(dtype) * x.astype(dtype), addend.astype(dtype)
        if _digits(x.dtype) + _digits(factor.dtype) > _digits(dtype):
            product = product + _zero_like(wide)
        return rounded((product + wide).astype(addend.dtype))
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


def _zero_like(array: jax.Array) -> jax.Array:
    """Zeros with the array's signs, which change no sum with it.

    XLA makes one operation with one rounding of a product and the sum after it, whatever stands between them that it
    can take away, an `optimization_barrier` too. With a zero of this kind the product is rounded in the same operation.
    """
    array = lax.stop_gradient(array)
    return jnp.where(array < 0, -0.0, jnp.where(array == 0, array, 0.0))


def _digits(dtype: Any) -> int:
    """How many binary digits a number of this dtype has; a product of two has the sum of theirs."""
    return int(jnp.finfo(dtype).nmant) + 1  # type: ignore[no-untyped-call]
