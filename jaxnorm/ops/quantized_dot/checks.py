"""Checks of the operands of a product, as `jaxnorm.ops.checks`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.ops import checks
from jaxnorm.quantization import Quantized

_QUANTIZE = "as jaxnorm.quantize(weights, jaxnorm.Quantization(jax.numpy.int8)) gives them"


def check_weights(function: str, weights: Any, x: Any) -> Quantized:
    if not isinstance(weights, Quantized):
        swapped = " Are x and weights in each other's place?" if isinstance(x, Quantized) else ""
        raise TypeError(
            f"{function}: weights must be a jaxnorm.Quantized, {_QUANTIZE}, got {type(weights).__name__}; "
            f"without quantised weights use jax.numpy.matmul.{swapped}"
        )
    shape = weights.values.shape
    if len(shape) != 2:
        raise ValueError(
            f"{function}: weights have shape {shape}, expected two axes (N, K): outputs, and what is summed; for "
            f"several matrices use jax.vmap."
        )
    check_scales(function, "weights", weights)
    return weights


def check_x(function: str, x: Any, weights: Quantized) -> Any:
    """x as an array or a `Quantized`, which goes with the weights."""
    if isinstance(x, Quantized):
        check_scales(function, "x", x)
        values = x.values
        _check_dtypes(function, values.dtype, weights.values.dtype)
    else:
        x = values = checks.check_array(function, "x", x)
    depth = weights.values.shape[1]
    if values.ndim == 0 or values.shape[-1] != depth:
        transposed = values.ndim and weights.values.shape[0] == values.shape[-1]
        remedy = "quantize their transpose, so that K is their last axis" if transposed else "K must be the same"
        raise ValueError(
            f"{function}: x has shape {values.shape} and weights {weights.values.shape}, expected (..., K) and (N, K); "
            f"{remedy}."
        )
    return x


def check_scales(function: str, name: str, quantized: Quantized) -> None:
    shape, scales = quantized.values.shape, quantized.scales.shape
    expected = (*shape[:-1], 1)
    if scales in ((), expected):
        return
    groups = scales[:-1] == shape[:-1]
    why = "a product has no scales of groups, since they cannot be taken out of its sum" if groups else ""
    remedy = "take granularity='token' or 'tensor'" if groups else "quantize along the last axis"
    raise ValueError(
        f"{function}: {name} with values of shape {shape} has scales of shape {scales}, expected {expected} or (); "
        f"{f'{why}: ' if why else ''}{remedy}."
    )


def dtypes_beside(weights: Any) -> tuple[str, ...]:
    """The dtypes of quantised activations that there is a product of with weights of this dtype."""
    return ("float8_e4m3fn", "float8_e5m2") if jnp.issubdtype(weights, jnp.floating) else ("int8",)


def _check_dtypes(function: str, x: Any, weights: Any) -> None:
    if x.name not in (expected := dtypes_beside(weights)):
        raise TypeError(
            f"{function}: x has values of {x} and weights of {weights}, expected {' or '.join(expected)} for x; "
            f"quantize it to that, or the weights to a dtype like it. Only weights have 4 bits."
        )


def check_bias(function: str, bias: Any, weights: jax.Array) -> jax.Array | None:
    if bias is None:
        return None
    array = checks.check_array(function, "bias", bias)
    if array.shape != weights.shape[:1]:
        raise ValueError(
            f"{function}: bias has shape {array.shape}, expected {weights.shape[:1]}: a number for each row of weights."
        )
    return array
