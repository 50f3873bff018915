"""Argument checks of the cross-entropy of a product."""

import jax

from jaxnorm.ops import checks


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
