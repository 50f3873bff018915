"""How a norm of `flax.nnx` calls the functions of this package."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm import _flax
from jaxnorm._flax import nnx
from jaxnorm.quantization import Quantized


def value(parameter: Any) -> jax.Array | None:
    return None if parameter is None else parameter[...]


def _parameters(module: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """scale and bias, which an RMSNorm has not."""
    return value(module.scale), value(getattr(module, "bias", None))


def fused(norm: Callable[..., Any], module: Any, mask: jax.Array | None, rows: tuple[jax.Array, ...]) -> Any:
    """`norm` of x, or of x and a residual, called as `module` says, or None where Flax's own code computes it."""
    *_, normalised = rows  # with a residual the sum, which is like it
    parameters = _parameters(module)
    dtype = nnx.nn.dtypes.canonicalize_dtype(normalised, *parameters, dtype=module.dtype)
    dtypes = (dtype, *(a.dtype for a in (*rows, *parameters) if a is not None))
    why = _flax.why_flax(module, normalised, mask, parameters, dtypes)
    axes = _flax.called_axes(module, normalised, mask, why)
    if axes is None:
        return None
    axis, features = axes
    rows, parameters = _operands(rows, parameters, dtype, features)
    options = _flax.options(module)
    return norm(
        *rows, *parameters, epsilon=module.epsilon, axis=axis, out_dtype=dtype, axis_name=module.axis_name, **options
    )


def quantized(
    module: Any, mask: object, x: jax.Array, residual: jax.Array | None, scales: dict[str, Any]
) -> Quantized | tuple[Quantized, jax.Array]:
    """The quantised norm of x, or of x and a residual, called as `module` says."""
    rows: tuple[jax.Array, ...] = (jnp.asarray(x),)
    if residual is not None:
        rows = _flax.with_residual(module, x, residual)
    axis = _flax.function_axes(module, rows[-1], mask, "a quantised norm")
    parameters = _parameters(module)
    dtype = nnx.nn.dtypes.canonicalize_dtype(rows[-1], *parameters, dtype=module.dtype)
    (x, *added), (scale, bias) = _operands(rows, parameters, dtype, axis)
    result: Quantized | tuple[Quantized, jax.Array] = module._functions.quantized(
        x,
        scale,
        bias,
        quantization=module.quantization,
        residual=added[0] if added else None,
        straight_through=module.straight_through,
        epsilon=module.epsilon,
        axis=axis,
        axis_name=module.axis_name,
        **scales,
        **_flax.rounded_once(module, "a quantised norm"),
    )
    return result


def _operands(
    rows: tuple[jax.Array, ...],
    parameters: tuple[jax.Array | None, jax.Array | None],
    dtype: Any,
    axes: tuple[int, ...],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array | None, jax.Array | None]]:
    """x, or x and a residual, and parameters: rounded to `dtype` as Flax rounds them, parameters with `axes`' shape."""
    features = tuple(rows[-1].shape[axis] for axis in axes)
    for parameter in parameters:
        if parameter is not None and parameter.size != math.prod(features):
            raise ValueError(
                f"the norm's parameters are of {parameter.size} features, expected {math.prod(features)}: x has shape "
                f"{rows[-1].shape}, of which the axes {axes} are features. Construct it with that many."
            )
    scale, bias = (None if p is None else promote(p, dtype).reshape(features) for p in parameters)
    return (tuple(promote(x, dtype) for x in rows) if len(rows) == 1 else rows), (scale, bias)


def promote(array: jax.Array, dtype: Any) -> jax.Array:
    """`array` as Flax's promotion to `dtype` rounds it. Mere widening is left to the kernel: fewer bytes to read."""
    return array if dtype in (array.dtype, jnp.float32) else array.astype(dtype)
