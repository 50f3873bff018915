"""Argument checks of softmax and log-softmax."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxnorm.ops import checks
from jaxnorm.ops.mask import Mask, check_booleans, does_not_broadcast, fitted
from jaxnorm.primitive import broadcast, weights

_LEAST_OFFSET, _MOST_OFFSET = 1 - 2**31, 2**30  # beyond them an offset counts as these, and no sum of it wraps


class Causal(NamedTuple):
    """The keywords of a causal softmax as a caller gave them."""

    causal: Any
    offset: Any
    window: Any


def check_mask(function: str, where: object, causal: Causal, x: jax.Array, axes: tuple[int, ...]) -> Mask:
    """where and causal as a mask; over the last axis as kernels take one, and no larger than it came."""
    seen = _seen(function, causal, x, axes)
    if where is None:
        return seen
    given = check_booleans(function, where)
    if not weights.are_batch_dims(given.shape, x.shape):
        raise does_not_broadcast(function, given, x, "that of x")
    given = fitted(function, given, x, axes)
    if axes != (-1,) or given.shape[-1] == x.shape[-1]:
        return seen._replace(where=given)
    of_rows = jnp.where(given, np.iinfo(np.int32).max, 0)  # all columns of a row count, or none
    if seen.lengths is not None:
        of_rows = jnp.minimum(*broadcast.alike(x, of_rows, seen.lengths))
    return seen._replace(lengths=broadcast.fitted(x, of_rows))


def _seen(function: str, given: Causal, x: jax.Array, axes: tuple[int, ...]) -> Mask:
    """Of each row the columns before lengths, and of these the last of a window; nothing where it is not causal."""
    window, offset = _window(function, given.window), _number_or_array(function, given.offset)
    if not checks.check_flag(function, "causal", given.causal):
        if window is not None or not (isinstance(offset, int) and offset == 0):
            raise ValueError(f"{function}: offset and window are those of causal rows; pass causal=True with them.")
        return Mask()
    if axes != (-1,) or x.ndim < 2:
        raise ValueError(
            f"{function}: causal=True is for x of shape (..., queries, keys) and axis=-1, got x with shape {x.shape} "
            f"and the axes {axes}; for another order of axes pass where."
        )
    shape = (*(1,) * (x.ndim - 2), x.shape[-2], 1)
    lengths = lax.broadcasted_iota(jnp.int32, shape, x.ndim - 2) + 1
    lengths = checks.sharded_along(function, "causal", lengths, "x", x, broadcast.dim_map(shape))
    if isinstance(offset, int):
        most = max(_LEAST_OFFSET, min(offset, _MOST_OFFSET))
        lengths = lengths + most if most else lengths
    else:
        most = _MOST_OFFSET
        lengths, offset = broadcast.alike(x, lengths, _offset_by_rows(function, offset, x))
        lengths = broadcast.fitted(x, lengths + offset)
    queries = x.shape[-2]  # it may be symbolic
    hides = window is not None and not (isinstance(queries, int) and window >= queries + most)
    return Mask(lengths=lengths, window=window if hides else None)


def _window(function: str, value: object) -> int | None:
    if value is None:
        return None
    window = checks.check_int(function, "window", value, "None is without one", positive=True)
    return min(window, np.iinfo(np.int32).max)


def _number_or_array(function: str, value: object) -> int | jax.Array:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        # Of integers of 64 bits jax.numpy makes others of 32, which wrap.
        least = 0 if value.dtype.kind == "u" else max(_LEAST_OFFSET, int(np.iinfo(value.dtype).min))
        value = np.clip(value, least, min(_MOST_OFFSET, int(np.iinfo(value.dtype).max))).astype(np.int32)
    if not checks.is_array(value) or not jnp.issubdtype((offset := jnp.asarray(value)).dtype, np.integer):
        got = getattr(value, "dtype", None) or repr(value)
        raise TypeError(f"{function}: offset must be an int or an array of integers, got {got}.")
    return offset


def _offset_by_rows(function: str, offset: jax.Array, x: jax.Array) -> jax.Array:
    """The offset with x's rank, as int32 and no further than sums of it go without wrapping."""
    leading = x.shape[:-2]
    if offset.ndim > len(leading) or any(n not in (1, m) for n, m in zip(offset.shape, leading, strict=False)):
        raise ValueError(
            f"{function}: offset has shape {offset.shape}, expected () or one by x's leading axes {leading}, from the "
            "first: for each 1 or the length there."
        )
    offset = lax.expand_dims(offset, range(offset.ndim, x.ndim))
    offset = offset.astype(np.int32) if offset.dtype.itemsize < 4 else offset
    least = 0 if jnp.issubdtype(offset.dtype, np.unsignedinteger) else _LEAST_OFFSET
    offset = jnp.clip(offset, least, _MOST_OFFSET).astype(np.int32)
    return checks.sharded_along(function, "offset", offset, "x", x, broadcast.dim_map(offset.shape))
