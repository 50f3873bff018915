"""The types of arrays that go with x: along which of its axes they go, how they are split where it is, their dtypes."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

# For each axis of an array the axis of x that it goes along; None is an axis of its own, which is not split.
Layout = tuple[int | None, ...]


def wide_dtype(dtypes: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """What operands of these dtypes are computed in."""
    return np.dtype(np.float64 if any(dtype == np.float64 for dtype in dtypes) else np.float32)


def whole(ndim: int) -> Layout:
    """The layout of x, and of what is like it."""
    return tuple(range(ndim))


def rows(ndim: int, axes: int) -> Layout:
    """The layout of what has one element, or one part of a row, for each row."""
    return (*range(ndim - axes), *(None for _ in range(axes)))


def weight(ndim: int, axes: int, lead: Sequence[int]) -> Layout:
    """The layout of a weight with this lead."""
    others = ndim - axes
    of_lead = (None if length == 1 else others - len(lead) + i for i, length in enumerate(lead))
    return (*of_lead, *range(others, ndim))


def result_like(x: Any, layout: Layout, shape: Sequence[Any], dtype: Any) -> Any:
    """The type of a result of this layout: over an Explicit mesh it is sharded as x is along the axes they share."""
    spec = PartitionSpec(*(None if axis is None else x.sharding.spec[axis] for axis in layout))
    return x.update(shape=tuple(shape), dtype=dtype, sharding=x.sharding.update(spec=spec), weak_type=False)


def broadcast(array: jax.Array, shape: Sequence[Any], x: Any, layout: Layout) -> jax.Array:
    """The array, repeated to this shape and sharded as `result_like` says for x, a type."""
    sharding = result_like(x, layout, shape, array.dtype).sharding
    return jnp.broadcast_to(array, shape, out_sharding=sharding if any(sharding.spec) else None)


def unsplit(array: jax.Array, axis: int) -> jax.Array:
    """The array, along this axis whole on each device of an Explicit mesh."""
    sharding: Any = jax.typeof(array).sharding
    spec = list(sharding.spec)
    if spec[axis] is None:
        return array
    spec[axis] = None
    whole: jax.Array = jax.sharding.reshard(array, sharding.update(spec=PartitionSpec(*spec)))
    return whole
