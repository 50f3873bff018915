"""Argument checks of the cross-entropy of a product."""

import jax

from jaxnorm.ops import checks
from jaxnorm.ops.mask import check_booleans


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
    weights, rows = checks.check_array(function, "row_weights", value), x.shape[:-1]
    if weights.shape != rows:
        remedy = "Reshape or broadcast row_weights, as with jax.numpy.broadcast_to."
        if weights.shape == kernel.shape[1:]:
            remedy = "Of weights of classes, w, pass w[labels]."
        elif weights.shape == rows[: weights.ndim]:
            index = ", ".join([":"] * weights.ndim + ["None"] * (len(rows) - weights.ndim))
            remedy = f"Pass jax.numpy.broadcast_to(row_weights[{index}], labels.shape)."
        raise ValueError(
            f"{function}: row_weights have shape {weights.shape}, expected {rows}: one for each row of x, which has "
            f"shape {x.shape}. {remedy}"
        )
    return weights


def check_classes(function: str, value: object, x: jax.Array, kernel: jax.Array) -> jax.Array | None:
    """value as a mask of classes, the same for all rows or of the logits' shape."""
    if value is None:
        return None
    where, rows, classes = check_booleans(function, value), x.shape[:-1], kernel.shape[1:]
    if where.shape not in (classes, (*rows, *classes)):
        remedy = f"Broadcast it, as with jax.numpy.broadcast_to(where, {(*rows, *classes)})."
        if where.shape == rows:
            remedy = "Of a mask of rows pass row_weights=where.astype(jax.numpy.float32)."
        raise ValueError(
            f"{function}: where has shape {where.shape}, expected {classes}, which classes there are, or the logits' "
            f"shape {(*rows, *classes)}, which there are for each row. {remedy}"
        )
    return where
