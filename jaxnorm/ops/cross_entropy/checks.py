"""Argument checks of cross-entropy, of logits and of a product."""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.native import compat
from jaxnorm.ops import checks, misuse
from jaxnorm.ops.cross_entropy.formula import IGNORED
from jaxnorm.ops.mask import check_booleans, does_not_broadcast
from jaxnorm.primitive import broadcast, weights


class Labels(NamedTuple):
    """Numbers of classes, and which of them are ignored; None: none."""

    numbers: jax.Array
    ignored: jax.Array | None

    def among(self, classes: int) -> tuple[jax.Array, jax.Array]:
        """The labels as kernels take them, and which of them are wrong."""
        is_class = (self.numbers >= 0) & (self.numbers < classes)
        here = jnp.where(is_class, self.numbers, -1).astype(jnp.int32)
        if self.ignored is None:
            return here, ~is_class
        return jnp.where(self.ignored, IGNORED, here), ~(is_class | self.ignored)


def check_labels(
    function: str,
    value: object,
    logits: jax.Array,
    axes: tuple[int, ...],
    ignore_index: int | None,
    name: str = "logits",
) -> Labels:
    """value as integers of logits' shape without the axes, of 32 bits or more."""
    if not checks.is_array(value):
        raise TypeError(
            f"{function}: labels must be an array of integers, got {type(value).__name__}; pass "
            "jax.numpy.asarray(labels)."
        )
    # Of integers of 64 bits jax.numpy makes others of 32, which may be those of classes.
    labels = np.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else jnp.asarray(value)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"{function}: labels must be an array of integers, got {labels.dtype}; they are the numbers of classes, "
            f"as one-hot vectors have them in jax.numpy.argmax(labels, -1)."
        )
    expected = _without(logits, axes)
    if labels.shape != expected:
        others = [a for a in range(logits.ndim) if labels.shape == (*logits.shape[:a], *logits.shape[a + 1 :])]
        raise ValueError(
            f"{function}: labels have shape {labels.shape}, expected {expected}: that of {name}, {logits.shape}, "
            f"without {_named(axes)}.{misuse.fitting('axis', others if name == 'logits' else [])}"
        )
    labels = labels if labels.dtype.itemsize >= 4 else labels.astype(jnp.int32)
    ignored = None
    if ignore_index is not None and ignore_index in _range(labels.dtype):
        ignored = jnp.asarray(labels == ignore_index)
    if isinstance(labels, np.ndarray) and labels.dtype.itemsize > 4:
        narrow = labels.astype(np.int32)
        labels = np.where(narrow == labels, narrow, -1)
    return Labels(jnp.asarray(labels), ignored)


def _range(dtype: np.dtype) -> range:
    info = np.iinfo(dtype)
    return range(int(info.min), int(info.max) + 1)


def _without(logits: jax.Array, axes: tuple[int, ...]) -> tuple[int, ...]:
    """logits' shape without these axes."""
    return tuple(n for axis, n in enumerate(logits.shape) if axis - logits.ndim not in axes)


def _named(axes: tuple[int, ...]) -> str:
    return f"axis {axes[0]}" if len(axes) == 1 else f"the axes {axes}"


def check_axes(function: str, axis: Any, logits: jax.Array) -> tuple[int, ...]:
    """The axes of the classes in the order given, counted from the end."""
    if checks.is_array(axis) and np.ndim(axis):
        raise TypeError(
            f"{function}: axis must be an int or a sequence of ints, got an array of shape {np.shape(axis)}; is it "
            f"where? Then pass where=..."
        )
    axes = checks.check_axes(function, axis, logits.ndim, "logits")
    if len(axes) == 1:
        return axes
    axes = tuple(a - logits.ndim if a >= 0 else a for a in map(operator.index, axis))
    if any(compat.shard_count(logits, a) > 1 for a in axes[1:]):
        raise ValueError(
            f"{function}: logits, which have shape {logits.shape}, are split over an Explicit mesh along one of the "
            f"axes {axes} of the classes that is not the first of them; reshard logits, or reshape them to one axis."
        )
    return axes


def check_where(function: str, value: object, logits: Any, axes: tuple[int, ...]) -> jax.Array | None:
    """value as a mask of the rank of logits, or of their type, by the classes it has or by the rows; None for None."""
    if value is None:
        return None
    where, rows = check_booleans(function, value), _without(logits, axes)
    is_of_classes = weights.are_batch_dims(where.shape, logits.shape)
    if where.ndim == logits.ndim or not weights.are_batch_dims(where.shape, rows):
        if not is_of_classes:
            raise does_not_broadcast(function, where, logits, f"labels' shape, {rows}, or to that of logits")
        return broadcast.with_rank_of(logits, where)
    of_rows = jnp.expand_dims(where, range(len(rows) - where.ndim))
    of_rows = jnp.expand_dims(of_rows, axes)
    of_classes = broadcast.with_rank_of(logits, where)
    if is_of_classes and of_rows.shape != of_classes.shape:
        own = [axis for axis in range(-logits.ndim, 0) if axis not in axes][len(rows) - where.ndim :]
        raise ValueError(
            f"{function}: where has shape {where.shape}, which broadcasts to labels' shape, {rows}, and to that of "
            f"logits, {logits.shape}; say which is meant, {_index(logits.ndim, own)} for rows or "
            f"{_index(logits.ndim, range(-where.ndim, 0))} for classes."
        )
    return of_rows


def _index(ndim: int, own: Sequence[int]) -> str:
    """where with this rank, of which these axes are its own."""
    parts = [":" if axis in own else "None" for axis in range(-ndim, 0)]
    while parts[-1] == ":":
        parts.pop()
    return f"where[{', '.join(parts)}]"


def in_one_axis(array: jax.Array, axes: tuple[int, ...], logits_shape: tuple[int, ...]) -> jax.Array:
    """An array of logits' rank with the axes of classes, in this order, as its last one; 1 long if they all are."""
    if any(array.shape[axis] != 1 for axis in axes):
        lengths = [(logits_shape if axis in axes else array.shape)[axis] for axis in range(-array.ndim, 0)]
        array = jnp.broadcast_to(array, lengths)
    others = [axis for axis in range(-array.ndim, 0) if axis not in axes]
    moved = array.transpose([axis % array.ndim for axis in (*others, *axes)])
    return moved.reshape(*moved.shape[: len(others)], math.prod(moved.shape[len(others) :]))


def check_share(function: str, name: str, value: object) -> float:
    number = checks.check_number(function, name, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{function}: {name} must be from 0 to 1, got {number}; 0.1 is usual, and 0 is without it.")
    return number


def check_soft_cap(function: str, value: object) -> float:
    """value as a positive number; 0 for None."""
    if value is None:
        return 0.0
    number = checks.check_number(function, "soft_cap", value)
    if not number > 0:
        raise ValueError(f"{function}: soft_cap must be positive, got {number}; None is without it.")
    return number


def check_kernel(function: str, value: object, x: jax.Array) -> jax.Array:
    kernel = checks.check_array(function, "kernel", value)
    if kernel.ndim != 2 or kernel.shape[0] != x.shape[-1]:
        is_transposed = kernel.ndim == 2 and kernel.shape[1] == x.shape[-1]
        remedy = "It is what x is multiplied by."
        if is_transposed:
            remedy = "Pass kernel.T, as of an embedding table."
        elif x.ndim == 2 and kernel.shape[-1:] == x.shape[:1]:
            remedy = "Are x and kernel in each other's place?"
        raise ValueError(
            f"{function}: kernel has shape {kernel.shape}, expected ({x.shape[-1]}, classes) for x with shape "
            f"{x.shape}. {remedy}"
        )
    return kernel


def check_bias(function: str, value: object, kernel: jax.Array) -> jax.Array | None:
    if value is None:
        return None
    bias = checks.check_array(function, "bias", value)
    if bias.shape != kernel.shape[1:]:
        raise ValueError(
            f"{function}: bias has shape {bias.shape}, expected {kernel.shape[1:]}: one number for each class of "
            f"kernel, which has shape {kernel.shape}. Reshape bias."
        )
    return bias


def check_row_weights(function: str, value: object, x: jax.Array, kernel: jax.Array) -> jax.Array | None:
    """value as an array of labels' shape."""
    if value is None:
        return None
    array, rows = checks.check_array(function, "row_weights", value), x.shape[:-1]
    if array.shape != rows:
        remedy = "Reshape or broadcast row_weights, as with jax.numpy.broadcast_to."
        if array.shape == kernel.shape[1:]:
            remedy = "Of weights of classes, w, pass w[labels]."
        elif array.shape == rows[: array.ndim]:
            index = ", ".join([":"] * array.ndim + ["None"] * (len(rows) - array.ndim))
            remedy = f"Pass jax.numpy.broadcast_to(row_weights[{index}], labels.shape)."
        raise ValueError(
            f"{function}: row_weights have shape {array.shape}, expected {rows}: one for each row of x, which has "
            f"shape {x.shape}. {remedy}"
        )
    return array
