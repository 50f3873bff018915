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


class Exponentials(NamedTuple):
    """Of a row z: exp(z - top), 0 where a column does not count; their sum, and its logarithm with top.

    top is the largest that counts. Of a row where none does the sum is 0, and the logarithm -inf.
    """

    each: jax.Array
    top: jax.Array
    sum: jax.Array

    @property
    def logsumexp(self) -> jax.Array:
        return jnp.log(self.sum) + self.top


def exponentials(spec: RowSpec, z: jax.Array, counts: jax.Array | None) -> Exponentials:
    greatest = lax.stop_gradient(jnp.max(only(counts, z, -jnp.inf), axis=spec.axes, keepdims=True, initial=-jnp.inf))
    top = greatest if spec.shards is None else spec.shards.top(greatest)
    # Of what does not count the difference may be infinite, and so would be its exponential, of which the gradient is
    # no number then, though it is not chosen.
    each = only(counts, jnp.exp(only(counts, z - top)))
    return Exponentials(each, top, sum_over_row(spec, each))


def sum_over_row(spec: RowSpec, v: jax.Array) -> jax.Array:
    of_shard = jnp.sum(v, axis=spec.axes, keepdims=True)
    return of_shard if spec.shards is None else spec.shards.add(of_shard)
