"""Which columns of a row count: those that `where` allows, and of them those from its start on and before its length.

`where` has x's rank. Both may be 1 long along the axes of x along which they do not differ. The last functions check
the argument `where`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.ops import checks
from jaxnorm.primitive import broadcast
from jaxnorm.primitive.op import RowSpec
from jaxnorm.sharding import dims


class Mask(NamedTuple):
    where: jax.Array | None = None
    lengths: jax.Array | None = None
    starts: jax.Array | None = None  # where there are lengths, in programs of before
    window: int | None = None  # in its place: how many columns before its length a row has at most


def columns(spec: RowSpec, x: jax.Array) -> jax.Array:
    """The number of each column of rows of one axis, split as x is along it; of a shard, in the whole row."""
    (axis,) = spec.axes
    along = [i if i == x.ndim + axis else None for i in range(x.ndim)]
    shape = [1 if i is None else x.shape[i] for i in along]
    sharding = dims.result_like(jax.typeof(x), tuple(along), shape, np.int32).sharding
    out_sharding = sharding if any(sharding.spec) else None
    numbers = lax.broadcasted_iota(np.int32, shape, x.ndim + axis, out_sharding=out_sharding)
    return numbers if spec.shards is None else numbers + spec.shards.index() * x.shape[axis]


def counted(spec: RowSpec, x: jax.Array, mask: Mask) -> jax.Array | None:
    """Which elements of x count, to be broadcast against it; None: all."""
    if mask.lengths is None:
        return mask.where
    numbers = columns(spec, x)
    counts = numbers < mask.lengths
    starts = mask.starts if mask.window is None else jnp.maximum(mask.lengths, 0) - mask.window
    if starts is not None:
        counts &= numbers >= starts
    return counts if mask.where is None else mask.where & counts


def only(counts: jax.Array | None, v: jax.Array, other: float = 0.0) -> jax.Array:
    """v where it counts, elsewhere the other number."""
    return v if counts is None else jnp.where(counts, v, other)


def nan_where(is_nan: jax.Array, other: float) -> jax.Array:
    """NaN there, elsewhere 0 or 1; without a constant that `jax.debug_nans` takes for the result of an eager op."""
    return jnp.sqrt(jnp.where(is_nan, -1.0, other))


def check_booleans(function: str, value: object) -> jax.Array:
    if not (isinstance(value, bool) or checks.is_array(value)):
        raise TypeError(
            f"{function}: where must be an array of booleans, got {type(value).__name__}; pass "
            "jax.numpy.asarray(where)."
        )
    where = jnp.asarray(value)
    if where.dtype != np.bool_:
        raise TypeError(
            f"{function}: where must be an array of booleans, got {where.dtype}; convert it first, as with where != 0."
        )
    return where


def does_not_broadcast(function: str, where: jax.Array, x: jax.Array, to: str) -> ValueError:
    return ValueError(
        f"{function}: where has shape {where.shape}, expected one that broadcasts to {to}, {x.shape}: for each of its "
        f"axes, from the last, 1 or the length there."
    )


def fitted(function: str, where: jax.Array, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """A mask that broadcasts to x's shape, with x's rank; over the last axis as kernels take one."""
    where = broadcast.with_rank_of(x, where)
    where = checks.sharded_along(function, "where", where, "x", x, broadcast.dim_map(where.shape))
    return broadcast.fitted(x, where) if axes == (-1,) else where
