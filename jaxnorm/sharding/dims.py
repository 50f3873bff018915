"""Dim maps: along which of x's axes each axis of another array goes, and so its type and its sharding."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

# For each axis of an array the axis of x that it goes along; None is an axis of its own, which is not sharded.
DimMap = tuple[int | None, ...]


class CallMaps(NamedTuple):
    """The dim maps of a call's operands and results, for an x of this rank.

    Operands may have more axes than x. `summed` are the axes of x along which each result is a sum. Where the result is
    the gradient of an operand, a kernel gives it in the dtype of that one, whose place is in `gradient_of`.
    """

    ndim: int
    operands: list[DimMap]
    results: list[DimMap]
    summed: list[tuple[int, ...]]
    gradient_of: list[int | None]


def wide_dtype(dtypes: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """What operands of these dtypes are computed in."""
    return np.dtype(np.float64 if any(dtype == np.float64 for dtype in dtypes) else np.float32)


def like_x(ndim: int) -> DimMap:
    """The dim map of x itself, and of what has its axes."""
    return tuple(range(ndim))


def per_row(ndim: int, axes: Sequence[int]) -> DimMap:
    """The dim map of what has one element, or one part of a row, for each row, whose axes of x these are."""
    return tuple(None if axis - ndim in axes else axis for axis in range(ndim))


def weight(ndim: int, axes: int, batch_dims: Sequence[int]) -> DimMap:
    """The dim map of a weight with these batch dims."""
    others = ndim - axes
    batch = (None if length == 1 else others - len(batch_dims) + i for i, length in enumerate(batch_dims))
    return (*batch, *range(others, ndim))


def result_like(x: Any, dim_map: DimMap, shape: Sequence[Any], dtype: Any) -> Any:
    """The type of a result with this dim map: over an Explicit mesh it is sharded as x along the axes they share."""
    spec = PartitionSpec(*(None if axis is None else x.sharding.spec[axis] for axis in dim_map))
    return x.update(shape=tuple(shape), dtype=dtype, sharding=x.sharding.update(spec=spec), weak_type=False)


def like(x: Any, dtype: Any) -> Any:
    return x.update(dtype=dtype, weak_type=False)


def broadcast(array: jax.Array, shape: Sequence[Any], x: Any, dim_map: DimMap) -> jax.Array:
    """The array, repeated to this shape and sharded as `result_like` says for x, a type."""
    sharding = result_like(x, dim_map, shape, array.dtype).sharding
    return jnp.broadcast_to(array, shape, out_sharding=sharding if any(sharding.spec) else None)


def resharded(array: jax.Array, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """The array sharded so over x's Explicit mesh."""
    sharding: Any = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding
    # Outside jit an array knows its devices, and the mesh need not be set.
    reshard: Any = jax.sharding.reshard if isinstance(x, jax.core.Tracer) else jax.device_put
    there: jax.Array = reshard(array, sharding.update(spec=spec))
    return there


def unsharded(array: jax.Array, axis: int) -> jax.Array:
    """The array with all of this axis on each device of an Explicit mesh."""
    sharding: Any = jax.typeof(array).sharding
    spec = list(sharding.spec)
    if spec[axis] is None:
        return array
    spec[axis] = None
    resharded: jax.Array = jax.sharding.reshard(array, sharding.update(spec=PartitionSpec(*spec)))
    return resharded
