"""How a norm of `flax.nnx` calls the functions of this package."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.flax import calls
from jaxnorm.flax.calls import nnx
from jaxnorm.quantization import Quantized


def value(parameter: Any) -> jax.Array | None:
    return None if parameter is None else parameter[...]


class HeadScales(nnx.Module):
    """The parameters of a `QKNormRotary`."""

    def __init__(
        self,
        head_dim: int,
        *,
        heads: tuple[int, int] | None = None,
        use_scale: bool = True,
        scale_init: Any = nnx.initializers.ones,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        shapes = [(head_dim,)] * 2 if heads is None else [(count, head_dim) for count in heads]
        self.q_scale, self.k_scale = (
            nnx.Param(scale_init(rngs.params(), shape, param_dtype)) if use_scale else None for shape in shapes
        )
        self.head_dim, self.heads, self.use_scale = head_dim, heads, use_scale
        self.dtype, self.param_dtype = dtype, param_dtype


def parameters_of(module: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """scale and bias, which an RMSNorm has not."""
    return value(module.scale), value(getattr(module, "bias", None))


def fused(norm: Callable[..., Any], module: Any, mask: jax.Array | None, rows: tuple[jax.Array, ...]) -> Any:
    """`norm` of x, or of x and an addend, called as `module` says, or None where Flax's own code computes it."""
    *_, normalised = rows  # with an addend the sum, which is like it
    parameters = parameters_of(module)
    dtype = nnx.nn.dtypes.canonicalize_dtype(normalised, *parameters, dtype=module.dtype)
    dtypes = (dtype, *(a.dtype for a in (*rows, *parameters) if a is not None))
    why = calls.why_flax(module, normalised, mask, parameters, dtypes)
    axes = calls.called_axes(module, normalised, mask, why)
    if axes is None:
        return None
    axis, features = axes
    rows, (scale, bias) = operands(rows, parameters, dtype, features)
    options = {"epsilon": module.epsilon, "axis_name": module.axis_name, **calls.options(module)}
    return norm(*rows, scale, bias=bias, axis=axis, out_dtype=dtype, **options)


def quantized(
    module: Any, mask: object, x: jax.Array, addend: dict[str, jax.Array], scales: dict[str, Any]
) -> Quantized | tuple[Quantized, jax.Array]:
    """The quantised norm of x, or of x and an addend, see `calls.with_addend`, called as `module` says."""
    rows = (x, *addend.values())
    axis = calls.function_axes(module, rows[-1], mask, "a quantised norm")
    parameters = parameters_of(module)
    dtype = nnx.nn.dtypes.canonicalize_dtype(rows[-1], *parameters, dtype=module.dtype)
    (x, *_), (scale, bias) = operands(rows, parameters, dtype, axis)
    result = module._functions.quantized(
        x,
        scale,
        bias=bias,
        quantization=module.quantization,
        **addend,
        straight_through=module.straight_through,
        epsilon=module.epsilon,
        axis=axis,
        axis_name=module.axis_name,
        **scales,
        **calls.rounded_once(module, "a quantised norm"),
    )
    return calls.quantized_and_sum(result)


def operands(
    rows: tuple[jax.Array, ...],
    parameters: tuple[jax.Array | None, jax.Array | None],
    dtype: Any,
    axes: tuple[int, ...],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array | None, jax.Array | None]]:
    """x, or x and an addend, and parameters: rounded to `dtype` as Flax rounds them, parameters with `axes`' shape."""
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
    return array if jnp.dtype(dtype) in (array.dtype, jnp.float32) else array.astype(dtype)
