"""Products of narrow arrays that are added up wide, on any platform and under any vmap, and their scales."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

Contracted = tuple[tuple[int, ...], tuple[int, ...]]  # the axes of both arrays that are summed
ALL_DIGITS = ("highest", "float32", lax.Precision.HIGHEST)


def wants_all_digits(precision: lax.PrecisionLike = None) -> bool:
    """Whether a product is to have all digits of float32, by its own precision or by JAX's default."""
    config: Any = jax.config
    given = precision if isinstance(precision, tuple) else (precision,)
    return any((config.jax_default_matmul_precision if one is None else one) in ALL_DIGITS for one in given)


def wide_dot(a: jax.Array, b: jax.Array, contracted: Contracted, dtype: DTypeLike, **options: Any) -> jax.Array:
    """The sums of products along the contracted axes of both, in this dtype; options are of `lax.dot_general`."""

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=np.dtype(dtype), **options)

    if not all(jnp.issubdtype(of.dtype, jnp.floating) and of.dtype.itemsize < 4 for of in (a, b)):
        return dot(a, b)
    # XLA for a CPU (JAX 0.10) has no kernel for some products of bfloat16 whose sums are of float32, as `mk,bmn->bkn`.
    # float32 has every value. Where there is one: 64 rows by 512x512 0.49 ms -> 0.71, 1024 by 2048x2048 103 -> 68 (two
    # cores of an AMD EPYC, 2026-11-29).
    y: jax.Array = lax.platform_dependent(
        a, b, cpu=lambda a, b: dot(a.astype(np.float32), b.astype(np.float32)), default=dot
    )
    return y


def times_scales(y: jax.Array, of_rows: jax.Array, of_columns: jax.Array) -> jax.Array:
    """y times both scales, of y's rank, the lesser one first: y times the greater one may be beyond float32 where the
    result is not."""
    rows, columns = (jnp.broadcast_to(scales, y.shape) for scales in (of_rows, of_columns))
    return y * jnp.minimum(rows, columns) * jnp.maximum(rows, columns)
