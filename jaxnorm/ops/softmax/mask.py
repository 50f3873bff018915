"""Which columns of a row count: those that `where` allows, and of them those before the row's length.

`where` has x's rank. Both may be 1 long along the axes of x along which they do not differ.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.primitive.op import RowSpec


class Mask(NamedTuple):
    where: jax.Array | None = None
    lengths: jax.Array | None = None


def columns(spec: RowSpec, x: jax.Array) -> jax.Array:
    """The number of each column of rows of one axis; of a shard, in the whole row."""
    (axis,) = spec.axes
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    numbers = lax.broadcasted_iota(jnp.int32, shape, x.ndim + axis)
    return numbers if spec.shards is None else numbers + spec.shards.index() * x.shape[axis]


def counted(spec: RowSpec, x: jax.Array, mask: Mask) -> jax.Array | None:
    """Which elements of x count, to be broadcast against it; None: all."""
    if mask.lengths is None:
        return mask.where
    before = columns(spec, x) < mask.lengths
    return before if mask.where is None else mask.where & before


def only(counts: jax.Array | None, v: jax.Array, other: float = 0.0) -> jax.Array:
    """v where it counts, elsewhere the other number."""
    return v if counts is None else jnp.where(counts, v, other)
