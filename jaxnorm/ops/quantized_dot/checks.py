"""Checks of the operands of a product, as `jaxnorm.ops.checks`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.ops import checks
from jaxnorm.quantization import Quantized

_QUANTIZE = "as jaxnorm.quantize(weights, jaxnorm.Quantization(jax.numpy.int8)) gives them"


def check_weights(function: str, weights: Any) -> Quantized:
    if not isinstance(weights, Quantized):
        raise TypeError(
            f"{function}: weights must be a jaxnorm.Quantized, {_QUANTIZE}, got {type(weights).__name__}; "
            f"without quantised weights use jax.numpy.matmul."
        )
    shape = weights.values.shape
    if len(shape) != 2:
        raise ValueError(
            f"{function}: weights have shape {shape}, expected two axes (N, K): outputs, and what is summed; for "
            f"several matrices use jax.vmap."
        )
    _check_scales(function, "weights", weights)
    return weights


def check_x(function: str, x: Any, weights: Quantized) -> Any:
    """x as an array or a `Quantized`, which goes with the weights."""
    if isinstance(x, Quantized):
        _check_scales(function, "x", x)
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


def _check_scales(function: str, name: str, quantized: Quantized) -> None:
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


def _check_dtypes(function: str, x: Any, weights: Any) -> None:
    of_integers = [jnp.issubdtype(dtype, jnp.integer) for dtype in (x, weights)]
    if x in map(jnp.dtype, ("int4", "float4_e2m1fn")):
        raise TypeError(f"{function}: x has values of {x}, expected 8 bits: only weights have 4.")
    if of_integers[0] != of_integers[1]:
        raise TypeError(
            f"{function}: x has values of {x} and weights of {weights}, expected both to be floats, or both integers; "
            f"quantize one of them to a dtype like the other's."
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
