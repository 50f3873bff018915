"""How linear layers of `flax.linen` are computed with quantised kernels, and in float8."""

import contextlib
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxnorm.flax import calls, linen_layers, replacement
from jaxnorm.flax.calls import linen
from jaxnorm.flax.linen_layers import Change
from jaxnorm.flax.replacement import of_rows, pair
from jaxnorm.ops.float8_linear.api import DEFAULT
from jaxnorm.ops.float8_linear.recipe import Float8Recipe, check_recipe
from jaxnorm.ops.misuse import explained
from jaxnorm.ops.quantize.api import quantize
from jaxnorm.ops.quantized_dot.api import quantized_dot
from jaxnorm.quantization import Quantization, Quantized
from jaxnorm.reports import Report

LAYERS = (linen.Dense, linen.DenseGeneral)


@explained
def using_quantized(
    inputs: Quantization | DTypeLike | None = None, *, only: replacement.Only | None = None
) -> contextlib._GeneratorContextManager[Report]:
    """Computes the linear layers whose kernels `jaxnorm.linen.quantize_linears` has quantised, within.

        with jaxnorm.linen.using_quantized(jnp.int8) as report:
            logits = model.apply(variables, tokens)

    Each is computed by `jaxnorm.quantized_dot`, as a `jaxnorm.nnx.QuantizedLinear` is, of a `Quantized` x too. Layers
    that have a kernel are left to Flax, so `init` within makes the same parameters. Outside Flax does not find the
    kernel of a layer that is quantised. What counts is where a program is traced, as for `using_layers`; an outer
    context is asked first. No gradient goes to values and scales: an optimiser is not given them.

    Args:
      inputs: how x is quantised on the way, with granularity "token", or the dtype alone: to float8 for kernels of
        float8, to int8 for those of int8 and int4. None is weight-only: x stays as it is.
      only: a function of the path and the layer, true of those that this context computes. None is all.

    Yields:
      A `jaxnorm.reports.Report` that fills while calls are traced.

    Raises:
      TypeError: inputs is no `Quantization`, only no function, or of a call, a kernel does not go with inputs.
      ValueError: a granularity is not "token".

    Source: `flax.linen.intercept_methods`.
    """
    if inputs is not None:
        inputs = of_rows("using_quantized", "inputs", inputs)
    replacement.check_only("using_quantized", only)

    def compute(layer: Any, x: Any) -> jax.Array:
        return product(layer, x, None, inputs)

    def why_left(layer: Any, x: Any) -> str | None:
        return None if linen_layers.is_quantised(layer) else "its kernel is not quantised"

    return linen_layers.changed(Change("quantised", LAYERS, compute, why_left), only, inputs)


def summed_axes(layer: Any, x: Any) -> tuple[int, ...]:
    """The axes of x over which a layer sums, counted from the last, in the order in which its kernel has them."""
    axis = getattr(layer, "axis", -1)
    rank = x.values.ndim if isinstance(x, Quantized) else x.ndim
    return tuple(sorted(a - rank if a >= 0 else a for a in ((axis,) if isinstance(axis, int) else axis)))


def product(layer: Any, x: Any, quantized: Quantized | None, inputs: Quantization | None) -> jax.Array:
    """The result of a layer with this kernel, or that of its variables."""
    features = (layer.features,) if isinstance(layer.features, int) else tuple(layer.features)
    axes = summed_axes(layer, x)
    rows = x.values if isinstance(x, Quantized) else x
    summed = [rows.shape[axis] for axis in axes]
    length = math.prod(summed)
    if quantized is None:
        shapes = {"values": (*features, *summed), "scales": (*features, *[1] * len(summed))}
        zeros = linen.initializers.zeros
        quantized = Quantized(*(layer.param(name, zeros, shape, jnp.float32) for name, shape in shapes.items()))
        if inputs is not None:
            pair("using_quantized", quantized.values.dtype, inputs)
    bias = layer.param("bias", layer.bias_init, features, layer.param_dtype) if layer.use_bias else None
    dtype = linen_layers.dtype_of(layer, x, bias)
    if not isinstance(x, Quantized):
        x = jnp.moveaxis(x.astype(dtype), axes, range(-len(axes), 0))
        x = x.reshape(*x.shape[: -len(axes)], length)
        x = x if inputs is None else quantize(x, inputs)
    matrix = Quantized(
        quantized.values.reshape(math.prod(features), length), quantized.scales.reshape(-1, 1), transposed=True
    )
    y = quantized_dot(x, matrix, out_dtype=dtype, bias=None if bias is None else bias.reshape(-1))
    return y.reshape(*y.shape[:-1], *features)


def using_float8(
    recipe: Float8Recipe = DEFAULT, *, only: replacement.Only | None = None
) -> contextlib._GeneratorContextManager[Report]:
    """Computes the linear layers of all models that are called, or traced, within by `jaxnorm.float8_linear`.

        with jaxnorm.linen.using_float8() as report:
            logits = model.apply(variables, tokens)

    Each `flax.linen.Dense` is computed as a `jaxnorm.nnx.Float8Linear` is, of a `Quantized` too. Modules, parameters,
    their names and checkpoints stay the same, and `init` within makes the same parameters. Left to their own code are
    `DenseGeneral`, `Einsum`, convolutions and embeddings, subclasses with a `__call__` of their own, layers with a
    `dot_general`, `dot_general_cls` or `promote_dtype` of their own, and dtypes other than float32, bfloat16 and
    float16. What counts is where a program is traced, so `jax.grad` may be outside; it goes with `using_layers`.

    Args:
      recipe: how layers are rounded, and what is kept for the derivative.
      only: a function of the path and the layer, true of those to compute in float8. None is all.

    Yields:
      A `jaxnorm.reports.Report` that fills while calls are traced: `replaced` has (path, class) of each layer that is
      computed in float8, `left` has (path, class, why) of each that is not.

    Raises:
      TypeError: recipe is no `Float8Recipe`, or only no function.

    Source: `flax.linen.intercept_methods`.
    """
    replacement.check_only("using_float8", only)
    compute = partial(_dense, check_recipe("using_float8", recipe))
    remedy = ": give this one dot_general=recipe.dot_general"
    change = Change("computed in float8", (linen.Dense,), compute, linen_layers.why_left, remedy)
    return linen_layers.changed(change, only, recipe)


def _dense(recipe: Float8Recipe, module: Any, x: Any) -> jax.Array:
    rows = x.values if isinstance(x, Quantized) else x
    kernel = module.param("kernel", module.kernel_init, (rows.shape[-1], module.features), module.param_dtype)
    bias = module.param("bias", module.bias_init, (module.features,), module.param_dtype) if module.use_bias else None
    return calls.float8_linear(module, recipe, x, kernel, bias)
