"""Linear layers of `flax.linen` with quantised weights, and how they are computed."""

import contextlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxnorm.flax import linen_layers, replacement
from jaxnorm.flax.calls import linen
from jaxnorm.flax.linen_layers import Change
from jaxnorm.flax.quantizations import of_rows, pair
from jaxnorm.ops.quantize.api import quantize
from jaxnorm.ops.quantized_dot.api import quantized_dot
from jaxnorm.quantization import Quantization, Quantized
from jaxnorm.reports import Report

LAYERS = (linen.Dense, linen.DenseGeneral)


def using_quantized(
    activations: Quantization | DTypeLike | None = None, *, only: replacement.Only | None = None
) -> contextlib._GeneratorContextManager[Report]:
    """Computes the linear layers whose weights `jaxnorm.linen.quantize_linears` has quantised, within.

        with jaxnorm.linen.using_quantized(jnp.int8) as report:
            logits = model.apply(variables, tokens)

    Each is computed by `jaxnorm.quantized_dot`, as a `jaxnorm.nnx.QuantizedLinear` is, and the result has Flax's dtype.
    x may be a `Quantized`, as a `QuantizedRMSNorm` gives it, of what is summed along its last axis; then the result is
    of `dtype`, or bfloat16 where that is None. Layers that have a kernel are left to Flax, so `init` within makes the
    same parameters.

    Flax's code for a layer that is quantised does not find its kernel, which is an error outside. What counts is where
    a program is traced, as for `using_layers`, and all these contexts go together. An outer one is asked first, so one
    with `only` may have another within that computes the rest.

    No gradient goes to values and scales: leave them out of what is differentiated, and of what an optimiser gets.

    Args:
      activations: how x is quantised on the way, with granularity "token", or the dtype alone: to float8 for weights of
        float8, to int8 for those of int8 and int4. None is weight-only: x stays as it is.
      only: a function of the path and the layer, true of those that this context computes. None is all.

    Yields:
      A `jaxnorm.reports.Report` that fills while calls are traced: `replaced` has (path, class) of each layer that
      is computed so, `left` has (path, class, why) of each that is not.

    Raises:
      TypeError: activations is no `Quantization`, or only no function; of a call, if its weights do not go with
        activations.
      ValueError: a granularity is not "token".

    Source: `flax.linen.intercept_methods`.
    """
    if activations is not None:
        activations = of_rows("using_quantized", "activations", activations)
    replacement.check_only("using_quantized", only)

    def compute(layer: Any, x: Any) -> jax.Array:
        return product(layer, x, None, activations)

    def why_left(layer: Any, x: Any) -> str | None:
        return None if linen_layers.is_quantised(layer) else "its kernel is not quantised"

    return linen_layers.changed(Change("quantised", LAYERS, compute, why_left), only, activations)


def summed_axes(layer: Any, x: Any) -> tuple[int, ...]:
    """The axes of x over which a layer sums, counted from the last, in the order in which its kernel has them."""
    axis = getattr(layer, "axis", -1)
    rank = x.values.ndim if isinstance(x, Quantized) else x.ndim
    return tuple(sorted(a - rank if a >= 0 else a for a in ((axis,) if isinstance(axis, int) else axis)))


def product(layer: Any, x: Any, quantized: Quantized | None, activations: Quantization | None) -> jax.Array:
    """The result of a layer with these weights, or those of its variables."""
    features = (layer.features,) if isinstance(layer.features, int) else tuple(layer.features)
    axes = summed_axes(layer, x)
    rows = x.values if isinstance(x, Quantized) else x
    summed = [rows.shape[axis] for axis in axes]
    length = math.prod(summed)
    if quantized is None:
        shapes = {"values": (*features, *summed), "scales": (*features, *[1] * len(summed))}
        zeros = linen.initializers.zeros
        quantized = Quantized(*(layer.param(name, zeros, shape, jnp.float32) for name, shape in shapes.items()))
        if activations is not None:
            pair("using_quantized", quantized.values.dtype, activations)
    bias = layer.param("bias", layer.bias_init, features, layer.param_dtype) if layer.use_bias else None
    dtype = linen_layers.dtype_of(layer, x, bias)
    if not isinstance(x, Quantized):
        x = jnp.moveaxis(x.astype(dtype), axes, range(-len(axes), 0))
        x = x.reshape(*x.shape[: -len(axes)], length)
        x = x if activations is None else quantize(x, activations)
    matrix = Quantized(quantized.values.reshape(math.prod(features), length), quantized.scales.reshape(-1, 1))
    y = quantized_dot(x, matrix, out_dtype=dtype, bias=None if bias is None else bias.reshape(-1))
    return y.reshape(*y.shape[:-1], *features)
