"""Rows by chunks, of which one after the other is computed."""

import math

import jax
import jax.numpy as jnp


def default_rows_per_chunk(x: jax.Array, kernel: jax.Array) -> int:
    """Rows whose logits take 512 MiB, no fewer than matrix products want; or more, for longer rows of x.

    For each chunk the sum of the kernel's gradient is read and written. Where logits take as many bytes as that, the
    three products compute for so long that it does not matter; half of the rows are always enough.
    """
    cols, classes = kernel.shape
    if not isinstance(classes, int):
        return 1024
    size, rows = max(1, classes * x.dtype.itemsize), math.prod(x.shape[:-1])
    as_gradient = 4 * cols * classes // size if isinstance(cols, int) else 0
    most = min(as_gradient, -(-rows // 2)) if isinstance(rows, int) else as_gradient
    return max(256, 2**29 // size, most)


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
