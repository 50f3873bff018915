"""Argument checks of softmax and log-softmax, which cross-entropy shares."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxnorm.native import compat
from jaxnorm.ops import checks
from jaxnorm.primitive import broadcast
from jaxnorm.sharding import dims
from jaxnorm.sharding.dims import DimMap


def check_where(function: str, value: object, x: jax.Array, axes: tuple[int, ...], x_name: str = "x") -> Any:
    """value as a mask with x's rank; over the last axis as kernels take one. None for None."""
    if value is None:
        return None
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, bool)) and not hasattr(value, "__jax_array__"):
        raise TypeError(
            f"{function}: where must be an array of booleans, got {type(value).__name__}; pass "
            "jax.numpy.asarray(where)."
        )
    where = jnp.asarray(value)
    if where.dtype != np.bool_:
        raise TypeError(
            f"{function}: where must be an array of booleans, got {where.dtype}; convert it first, as with where != 0."
        )
    aligned = zip(reversed(where.shape), reversed(x.shape), strict=False)
    if where.ndim > x.ndim or not all(a in (1, b) for a, b in aligned):
        raise ValueError(
            f"{function}: where has shape {where.shape}, expected one that broadcasts to that of {x_name}, {x.shape}: "
            f"for each of its axes, from the last, 1 or the length there."
        )
    where = broadcast.with_rank_of(x, where)
    where = sharded_along(function, "where", where, x, broadcast.dim_map(where.shape))
    if axes != (-1,):
        return where
    return broadcast.fitted(x, broadcast.with_columns_of(x, where))


def causal_lengths(function: str, value: object, x: jax.Array, axes: tuple[int, ...]) -> Any:
    """How many columns of each row come not after its own position; None if not causal."""
    if not checks.check_flag(function, "causal", value):
        return None
    if axes != (-1,) or x.ndim < 2:
        raise ValueError(
            f"{function}: causal=True is for x of shape (..., queries, keys) and axis=-1, got x with shape {x.shape} "
            f"and the axes {axes}; for another order of axes pass where."
        )
    shape = (*(1,) * (x.ndim - 2), x.shape[-2], 1)
    lengths = lax.broadcasted_iota(jnp.int32, shape, x.ndim - 2) + 1
    return sharded_along(function, "causal", lengths, x, broadcast.dim_map(shape))


def sharded_along(function: str, name: str, array: jax.Array, x: jax.Array, dim_map: DimMap) -> jax.Array:
    """array, split over an Explicit mesh as x is along the axes they share, if it is whole on each device."""
    of_x: Any = jax.typeof(x).sharding
    spec: Any = jax.typeof(array).sharding.spec
    wanted = PartitionSpec(*(None if axis is None else of_x.spec[axis] for axis in dim_map))
    if spec == wanted or any(map(compat.awaits_reduction, map(jax.typeof, (x, array)))):
        return array
    if any(spec):
        raise ValueError(
            f"{function}: {name} is sharded as {spec} over an Explicit mesh, expected {wanted}, as the other array's "
            f"axes are, or all of it on each device. Reshard it, as with jax.sharding.reshard({name}, {wanted})."
        )
    return dims.resharded(array, x, wanted)
