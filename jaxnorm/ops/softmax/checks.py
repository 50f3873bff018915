"""Argument checks of softmax and log-softmax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.ops import checks
from jaxnorm.ops.mask import Mask, check_booleans, does_not_broadcast, fitted
from jaxnorm.primitive import broadcast, weights


def check_mask(function: str, where: object, causal: object, x: jax.Array, axes: tuple[int, ...]) -> Mask:
    """where and causal as a mask; over the last axis as kernels take one, and no larger than it came."""
    lengths = causal_lengths(function, causal, x, axes)
    if where is None:
        return Mask(None, lengths)
    given = check_booleans(function, where)
    if not weights.are_batch_dims(given.shape, x.shape):
        raise does_not_broadcast(function, given, x, "that of x")
    given = fitted(function, given, x, axes)
    if axes != (-1,) or given.shape[-1] == x.shape[-1]:
        return Mask(given, lengths)
    of_rows = jnp.where(given, np.iinfo(np.int32).max, 0)  # all columns of a row count, or none
    if lengths is not None:
        of_rows = jnp.minimum(*broadcast.alike(x, of_rows, lengths))
    return Mask(None, broadcast.fitted(x, of_rows))


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
    return checks.sharded_along(function, "causal", lengths, "x", x, broadcast.dim_map(shape))
