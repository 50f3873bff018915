"""Rows by chunks, of which one after the other is computed."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def default_rows_per_chunk(classes: Any, dtype: np.dtype[Any]) -> int:
    """So many that their logits take 512 MiB, but no fewer than matrix products want."""
    return max(256, 2**29 // max(1, classes * dtype.itemsize)) if isinstance(classes, int) else 1024


def count(rows_per_chunk: int, x: jax.Array) -> int:
    """In how many chunks the rows of x go; those that an Explicit mesh splits, or whose number is not known, in one."""
    rows = math.prod(x.shape[:-1])
    if not isinstance(rows, int) or any(jax.typeof(x).sharding.spec):
        return 1
    least = -(-rows // rows_per_chunk) or 1
    return next((n for n in range(least, 2 * least) if rows % n == 0), least)


def split(chunks: int, array: jax.Array) -> jax.Array:
    """An array of rows, with an axis of chunks in front, of which each has rows from all parts of a mesh.

    Rows of zeros are added where they do not divide.
    """
    rows = array.reshape(-1, array.shape[-1])
    rows = jnp.pad(rows, [(0, -rows.shape[0] % chunks), (0, 0)])
    return jnp.moveaxis(rows.reshape(-1, chunks, rows.shape[-1]), 1, 0)


def joined(chunks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array of rows of this shape from its chunks."""
    rows = jnp.moveaxis(chunks, 0, 1).reshape(-1, chunks.shape[-1])
    return rows[: math.prod(shape[:-1])].reshape(shape)
