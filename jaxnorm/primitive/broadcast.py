"""Arrays that have one row for several of x, as a mask: of x's rank, along each leading axis 1 long or as long as x.

Kernels take such an array where its rows differ along at most two runs of x's leading axes: row r of x takes row
`r // inner % count` of each. An axis along which x is 1 long belongs to any run.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxnorm.sharding import dims
from jaxnorm.sharding.dims import DimMap

RUNS = 2  # that a kernel takes
MOST_RUNS = 8  # of a weight, along which it differs or does not: `ExampleMap::kMost` in C++


def dim_map(shape: Any) -> DimMap:
    return tuple(None if length == 1 else axis for axis, length in enumerate(shape))


def with_rank_of(x: jax.Array, array: jax.Array) -> jax.Array:
    return lax.expand_dims(array, range(x.ndim - array.ndim))


def alike(x: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """The arrays, repeated to one shape."""
    shape = jnp.broadcast_shapes(*(array.shape for array in arrays))
    return [_broadcast(array, shape, x) for array in arrays]


def fitted(x: jax.Array, array: jax.Array) -> jax.Array:
    """The array, repeated along as few rows as let a kernel take it."""
    shape = list(array.shape)
    while len(gaps := _gaps(x.shape, shape)) >= RUNS:
        for axis in min(gaps, key=lambda gap: math.prod(x.shape[axis] for axis in gap)):
            shape[axis] = x.shape[axis]
    return _broadcast(array, tuple(shape), x)


def runs(x_shape: Any, shape: Any) -> int:
    """How many runs of x's leading axes there are, along all of which the rows of an array differ, or do not."""
    differs = [length != 1 for of_x, length in zip(x_shape[:-2], shape[:-2], strict=True) if of_x != 1]
    return sum(1 for _ in itertools.groupby(differs))


def _gaps(x_shape: Any, shape: Any) -> list[list[int]]:
    """The axes between each two runs along which the rows of an array differ."""
    gaps: list[list[int]] = []
    gap: list[int] | None = None  # the axes since the last run; None before the first
    for axis, (of_x, length) in enumerate(zip(x_shape[:-1], shape[:-1], strict=True)):
        if length == 1 and of_x != 1 and gap is not None:
            gap.append(axis)
        elif length != 1:
            gaps += [gap] if gap else []
            gap = []
    return gaps


def _broadcast(array: jax.Array, shape: tuple[Any, ...], x: jax.Array) -> jax.Array:
    return array if array.shape == shape else dims.broadcast(array, shape, jax.typeof(x), dim_map(shape))
