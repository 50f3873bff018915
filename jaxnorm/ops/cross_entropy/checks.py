"""Argument checks of cross-entropy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnorm.ops import checks, misuse


def check_order(function: str, labels: Any, **others: Any) -> None:
    """That labels are not in the place of one of the others, which are floating-point."""
    for name, other in others.items():
        if _is(other, jnp.integer) and _is(labels, jnp.floating):
            raise TypeError(
                f"{function}: {name} {'are' if name.endswith('s') else 'is'} {other.dtype} and labels {labels.dtype}; "
                f"are they in each other's place?"
            )


def _is(value: Any, kind: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, kind)


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


def check_labels(function: str, value: object, logits: jax.Array, axis: int, name: str = "logits") -> jax.Array:
    """value as an array of integers of logits' shape without the axis, of 32 bits or more."""
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)) and not hasattr(value, "__jax_array__"):
        raise TypeError(
            f"{function}: labels must be an array of integers, got {type(value).__name__}; pass "
            "jax.numpy.asarray(labels)."
        )
    labels = jnp.asarray(value)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"{function}: labels must be an array of integers, got {labels.dtype}; they are the numbers of classes, "
            f"as one-hot vectors have them in jax.numpy.argmax(labels, -1)."
        )
    expected = tuple(n for i, n in enumerate(logits.shape) if i - logits.ndim != axis)
    if labels.shape != expected:
        axes = [a for a in range(logits.ndim) if labels.shape == (*logits.shape[:a], *logits.shape[a + 1 :])]
        raise ValueError(
            f"{function}: labels have shape {labels.shape}, expected {expected}: that of {name}, {logits.shape}, "
            f"without axis {axis}.{misuse.fitting('axis', axes if name == 'logits' else [])}"
        )
    return labels if labels.dtype.itemsize >= 4 else labels.astype(jnp.int32)


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


def check_ignore_index(function: str, value: object) -> int | None:
    return None if value is None else checks.check_int(function, "ignore_index", value, "None ignores no label")
